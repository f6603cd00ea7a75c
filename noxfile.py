"""All checks of the project. ``nox`` runs them on any machine with Python and pip.

torch is large, so all sessions share one *base* environment, which contains torch and the test tools. Each session has an
environment of its own with the wheels that it tests, and imports the packages of the base through a ``.pth`` file.
``nox --no-venv`` uses the running interpreter as the base and needs no network.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.sessions = [
    "lint",
    "typecheck",
    "build",
    "third_party",
    "interop",
    "docs",
    "redis(fake)",
    "tests",
]

ROOT = Path(__file__).parent
CORE = "td-core"
STORE = "td-store"  # installed alone with td-core, and with the packages that need it
SIBLINGS = ("td-memmap", "td-tensorclass", "td-distributed")  # installed in every combination
LATER: tuple[str, ...] = (
    "td-nn",
    "td-data",
    "td-safetensors",
    "td-hdf5",
    "td-arrow",
    "td-remote",
    "td-redis",
)  # installed alone with td-core, and with everything
if sys.version_info >= (3, 11):  # as zarr
    LATER = (*LATER, "td-zarr")
META = "td-all"
EVERYTHING = (CORE, STORE, *SIBLINGS, *LATER, META)
MODULES = {name: "td" if name == META else name.replace("-", "_") for name in EVERYTHING}

SUBSETS = [s for size in range(len(SIBLINGS) + 1) for s in itertools.combinations(SIBLINGS, size)]


def combine(others: tuple[str, ...]) -> tuple[str, ...]:
    """Return td-core, td-store if one of the other packages needs it, and these."""
    need = set(others) - {STORE, "td-tensorclass", "td-nn", "td-data"}
    return (CORE, *([STORE] if need else []), *others)


COMBINATIONS = {
    "+".join(name.removeprefix("td-") for name in (CORE, *subset)): combine(subset)
    for subset in (*SUBSETS, (STORE,), *((name,) for name in LATER))
}
COMBINATIONS["all"] = EVERYTHING
MATRIX = [
    nox.param(packages, device, id=f"{name}-{device}")
    for device in ("cpu", "cuda")
    for name, packages in COMBINATIONS.items()
]

BASE = (
    "torch", "numpy", "pluggy", "pytest", "pytest-xdist", "hypothesis", "tqdm", "xxhash", "safetensors", "h5py", "pyarrow",
    "redis", "zarr; python_version >= '3.11'", "hatchling", "pip>=22.3",
)  # fmt: skip
WORKERS = 2
REFERENCE = "tensordict"
BARE = ("--without-pip",)  # the pip of the base also installs into the environments of sessions
INTERPRETER = Path("Scripts" if os.name == "nt" else "bin") / "python"


@functools.cache
def base(cache: Path, current: bool) -> str:
    """Return the interpreter of the base environment, whose packages all sessions share; create it if needed."""
    if current:
        return sys.executable
    return make_base(cache / "base", sys.executable, (ROOT / "constraints.txt").read_text())


def make_base(home: Path, interpreter: str, constraints: str) -> str:
    """Install BASE into the environment ``home``, unless it is there, and return the interpreter."""
    python, stamp = home / INTERPRETER, home / "installed.txt"
    wanted = "\n".join([interpreter, sys.version, *BASE, constraints])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        call(interpreter, "-m", "venv", home)
        (home / "constraints.txt").write_text(constraints)
        call(python, "-m", "pip", "install", "-q", "-c", home / "constraints.txt", *BASE)
        stamp.write_text(wanted)
    return str(python)


@functools.cache
def wheels(python: str, cache: Path) -> dict[str, Path]:
    """Build the wheels of all packages; without hatchling, return the wheels that ``nox -s build`` wrote to ``dist``."""
    into = cache / "wheels"
    if not can(python, "import hatchling"):
        into = ROOT / "dist"
    else:
        shutil.rmtree(into, ignore_errors=True)
        for name in EVERYTHING:
            call(python, "-m", "hatchling", "build", "-t", "wheel", "-d", into, cwd=ROOT / "packages" / name)
    return {name: one(into, f"{name.replace('-', '_')}-*.whl") for name in EVERYTHING}


@functools.cache
def can(python: str, code: str) -> bool:
    """Return True if an interpreter runs a line of code without an error."""
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def find_python(*names: str) -> str:
    """Return the first of the named interpreters that runs, or the current one."""
    found = filter(None, map(shutil.which, names))
    return next((python for python in found if can(python, "")), sys.executable)


def call(*command: object, cwd: Path = ROOT) -> None:
    """Run a command outside of the sessions, since several sessions share its result."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def one(folder: Path, pattern: str) -> Path:
    """Return the only file of a folder that matches a pattern."""
    result = sorted(folder.glob(pattern))
    if len(result) != 1:
        raise FileNotFoundError(f"expected one {pattern} in {folder} (`nox -s build` makes them): {result}")
    return result[0]


class Environment:
    """The environment of one session: the base, the wheels of ``packages``, and ``extra`` requirements."""

    def __init__(
        self,
        session: nox.Session,
        packages: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        other_base: str | None = None,
    ) -> None:
        self.session = session
        cache, current = Path(session.cache_dir).resolve(), session.venv_backend == "none"
        self.base = other_base or base(cache, current)
        if current or other_base:
            home = Path(session.create_tmp()).resolve() / "venv"
            call(self.base, "-m", "venv", "--clear", *BARE, home)
        else:
            home = Path(session.virtualenv.location).resolve()
        self.python = str(home / INTERPRETER)
        shared = self.ask(
            self.base, "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
        )
        own = self.ask(self.python, "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(own) / "base.pth").write_text(shared + "\n")
        if packages:
            built = wheels(self.base, cache)
            self.install("--no-deps", "--no-index", *(str(built[name]) for name in packages))
        if extra:
            self.install("-c", "constraints.txt", *extra)

    def ask(self, python: str, code: str) -> str:
        """Return the output of a line of Python code."""
        return str(self.session.run(python, "-c", code, silent=True, log=False, external=True)).strip()

    def install(self, *arguments: str) -> None:
        """Install into this environment with the pip of the base."""
        self.session.run(
            self.base, "-m", "pip", "--python", self.python, "install", "-q", "--disable-pip-version-check",
            *arguments, external=True,
        )  # fmt: skip

    def run(self, *arguments: object, **variables: str) -> None:
        """Run Python in this environment, without the variables of the calling shell that affect the tests."""
        env = {"PYTHONPATH": None, "TD_PLUGINS": None, "OMP_NUM_THREADS": "1", **variables}
        self.session.run(self.python, *(str(part) for part in arguments), env=env, external=True)

    def pytest(self, *arguments: object, **variables: str) -> None:
        """Run pytest in this environment. Hypothesis runs all examples, the same in each run; by hand it draws a few new ones."""
        always = ("-q", "-p", "no:cacheprovider")
        self.run("-m", "pytest", *always, *arguments, **{"HYPOTHESIS_PROFILE": "full", **variables})

    def pytest_side_by_side(self, *arguments: object, **variables: str) -> None:
        """Run pytest in several processes, if the base has pytest-xdist."""
        if can(self.base, "import xdist"):
            # The processes must agree on the order of tests.
            arguments, variables = ("-n", WORKERS, *arguments), {"PYTHONHASHSEED": "0", **variables}
        self.pytest(*arguments, **variables)


@nox.session(venv_params=BARE)
def lint(session: nox.Session) -> None:
    """Check style, formatting, and that generated files follow from their tables."""
    environment = Environment(session, extra=("ruff",))
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    environment.run("tools/generate_methods.py", "--check")
    environment.run("tools/generate_stub.py", "--check")
    environment.run("tools/draw_diagrams.py", "--check")


@nox.session(venv_params=BARE)
@nox.parametrize("checker", ["mypy", "pyright"], ids=["mypy", "pyright"])
def typecheck(session: nox.Session, checker: str) -> None:
    """Check the packages with mypy --strict, and samples of user code with mypy and pyright."""
    if checker == "mypy":
        environment = Environment(session, (CORE,), extra=("mypy",))
        environment.run("-m", "mypy")
        environment.run("-m", "mypy", "tests/typing")
        environment.pytest("tests/test_one_source.py")
        return
    # The distribution "pyright" downloads the checker from the npm registry; basedpyright contains it.
    environment = Environment(session, EVERYTHING, extra=("basedpyright",))
    environment.run("-m", "basedpyright", "--pythonpath", environment.python)


@nox.session(venv_params=BARE)
def near(session: nox.Session) -> None:
    """Run the tests that the changed files, or the paths that are passed, can break: the nearest, in a minute."""
    environment = Environment(session, EVERYTHING)
    environment.run("tools/near.py", *session.posargs, HYPOTHESIS_PROFILE="quick")


@nox.session(venv_params=BARE)
def build(session: nox.Session) -> None:
    """Build the sdist of each package into ``dist``, and from it the wheel; check their contents, and install the wheels."""
    environment = Environment(session, extra=("build", "twine"))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for name in EVERYTHING:
        environment.run("-m", "build", "--no-isolation", "--outdir", "dist", f"packages/{name}")
        stem = name.replace("-", "_")
        with tarfile.open(one(ROOT / "dist", f"{stem}-*.tar.gz")) as archive:
            sources = {Path(*Path(entry).parts[1:]).as_posix() for entry in archive.getnames()}
        with zipfile.ZipFile(one(ROOT / "dist", f"{stem}-*-py3-none-any.whl")) as archive:
            files = archive.namelist()
        typed = f"{MODULES[name]}/py.typed"
        missing = {f"src/{typed}", "README.md", "LICENSE", "PKG-INFO"} - sources
        if typed not in files or missing:
            session.error(f"{name}: the wheel or sdist is incomplete: {missing or typed}")
        strangers = [f for f in files if not f.startswith((f"{MODULES[name]}/", f"{stem}-"))]
        if strangers:
            session.error(f"{name}: the wheel holds files of nobody: {strangers}")
    environment.run("-m", "twine", "check", "--strict", *sorted((ROOT / "dist").iterdir()))
    found = ("--no-index", "--find-links", "dist")
    for name in EVERYTHING:  # in the order of their dependencies
        environment.install(*found, name)
        environment.run("-c", f"import {MODULES[name]}")
    environment.install("--force-reinstall", "--no-deps", *found, *EVERYTHING)
    environment.install(*found, f"{META}[all]")
    environment.run("-m", "td_core", "plugins")


@nox.session(venv_params=BARE)
def third_party(session: nox.Session) -> None:
    """Install the examples with td-core and td-store only, that of a transport also with td-distributed, and test them."""
    environment = Environment(session, (CORE, STORE))
    for example in ("td-example-codec", "td-example-store"):
        environment.install("--no-build-isolation", f"./examples/{example}")
    for example in ("td-example-codec", "td-example-store"):
        environment.pytest(f"examples/{example}/tests", TD_EXPECT_PLUGINS=f"{CORE},{STORE}")
    built = wheels(environment.base, Path(session.cache_dir).resolve())
    environment.install("--no-deps", "--no-index", str(built["td-distributed"]))
    environment.install("--no-build-isolation", "./examples/td-example-transport")
    environment.pytest("examples/td-example-transport/tests")


@nox.session(venv_params=BARE)
def interop(session: nox.Session) -> None:
    """Exchange files and pickles with tensordict, in an environment that has both."""
    environment = Environment(session, EVERYTHING, extra=(REFERENCE,))
    environment.pytest_side_by_side("tests/interop", *session.posargs)


@nox.session(venv_params=BARE)
@nox.parametrize("packages, device", MATRIX)
def tests(session: nox.Session, packages: tuple[str, ...], device: str) -> None:
    """Test one combination of packages on one device.

    The tests of a package run in the environment that has only this package and those that it needs, and in the one that has all
    packages; there, a sixth of its tests. The tests in ``tests/``, which cover several packages or missing packages, run in every
    combination. A test marked ``once`` runs in one environment: of a package with td-core alone, of ``tests/`` with all
    packages. On a GPU, the environment with all packages runs every test.
    """
    python = base(Path(session.cache_dir).resolve(), session.venv_backend == "none")
    if device == "cuda" and not can(python, "import torch; assert torch.cuda.is_available()"):
        session.skip("torch finds no CUDA device on this machine")
    environment = Environment(session, packages)
    alone = len({*packages} - {STORE}) <= 2
    whole = packages if packages == EVERYTHING else packages[-1:] if alone else ()
    folders = [f"packages/{name}/tests" for name in whole]
    once = ["tests", f"packages/{META}/tests"] if packages == EVERYTHING else folders
    variables = {"TD_EXPECT_PLUGINS": ",".join(packages), "TD_TEST_DEVICE": device}
    if device == "cpu":
        variables["TD_ONCE_TESTS_IN"] = ",".join(once)
        if packages == EVERYTHING:
            variables["TD_SAMPLE_TESTS_OF"] = ",".join(f"packages/{name}/tests" for name in EVERYTHING[:-1])
    environment.pytest_side_by_side("tests", *folders, *session.posargs, **variables)


def run_all_tests(session: nox.Session, name: str, interpreter: str, constraints: str) -> None:
    """Run all tests with all packages in an environment with other versions, and print these."""
    with_zarr = can(interpreter, "import sys; assert sys.version_info >= (3, 11)")
    packages = tuple(package for package in EVERYTHING if package != "td-zarr" or with_zarr)
    python = make_base(Path(session.cache_dir).resolve() / name, interpreter, constraints)
    environment = Environment(session, packages, other_base=python)
    environment.run("-m", "pip", "list")
    folders = [f"packages/{package}/tests" for package in packages]
    variables = {"TD_EXPECT_PLUGINS": ",".join(packages)}
    if (expected := ROOT / "tests" / f"{name}.txt").exists():
        variables["TD_EXPECTED_FAILURES"] = str(expected)
    environment.pytest_side_by_side("tests", *folders, *session.posargs, **variables)


@nox.session(venv_params=BARE)
def floors(session: nox.Session) -> None:
    """Run all tests with the oldest supported versions: Python 3.10 if it is there, and the minimum of every dependency."""
    texts = [path.read_text() for path in ROOT.glob("packages/*/pyproject.toml")]
    minima = {
        match for text in texts for match in re.findall(r'^    "([\w-]+) >= ([\d.]+)"', text, re.MULTILINE)
    }
    constraints = "\n".join(f"{name}=={version}.*" for name, version in sorted(minima))
    run_all_tests(session, "floors", find_python("python3.10"), constraints)


@nox.session(venv_params=BARE)
def newest(session: nox.Session) -> None:
    """Run all tests with the newest releases of Python, as far as it is there, and of all dependencies."""
    run_all_tests(session, "newest", find_python("python3.14", "python3.13", "python3.12"), "")


@nox.session(venv_params=BARE)
def stores(session: nox.Session) -> None:
    """Exchange groups with other programs, through every kind of store: xarray, h5netcdf, tensorstore, fsspec."""
    environment = Environment(
        session,
        (CORE, STORE, *SIBLINGS, "td-zarr", "td-hdf5", "td-safetensors", "td-remote"),
        extra=("zarr", "tensorstore", "xarray", "fsspec[http]", "h5py", "h5netcdf"),
    )
    folders = [f"packages/{name}/tests" for name in ("td-zarr", "td-hdf5", "td-safetensors")]
    environment.pytest(*folders, *session.posargs)


@nox.session(venv_params=BARE)
def remote(session: nox.Session) -> None:
    """Run the tests of td-remote with every engine, against a local server of S3 and a web server, which the tests start."""
    environment = Environment(
        session, EVERYTHING, extra=("s3fs", "obstore", "moto[server]", "aiohttp", "gcsfs", "adlfs", "xarray")
    )
    environment.pytest(
        "packages/td-remote/tests",
        *session.posargs,
        TD_EXPECT_ENGINES="s3fs,obstore,moto,aiohttp,gcsfs,adlfs",
    )


@nox.session(venv_params=BARE)
def tables(session: nox.Session) -> None:
    """Exchange tables with other programs: pandas, polars, duckdb, Hugging Face datasets, xarray, JAX."""
    environment = Environment(
        session,
        (CORE, STORE, "td-tensorclass", "td-arrow"),
        extra=("pandas", "polars", "duckdb", "datasets", "xarray", "jax"),
    )
    environment.pytest("packages/td-arrow/tests", *session.posargs)


@nox.session(venv_params=BARE)
def mds(session: nox.Session) -> None:
    """Exchange data sets with mosaicml-streaming, without its bounds for numpy and torchvision, which it does not need here."""
    needs = (
        "boto3", "Brotli", "google-cloud-storage", "matplotlib", "paramiko", "python-snappy", "transformers<5", "zstd", "oci",
        "azure-storage-blob", "azure-storage-file-datalake", "azure-identity", "catalogue",
    )  # fmt: skip
    environment = Environment(session, (CORE, STORE, "td-tensorclass", "td-arrow"), extra=needs)
    environment.install("--no-deps", "mosaicml-streaming")
    environment.pytest("packages/td-arrow/tests/test_mds_library.py", *session.posargs)


@nox.session(venv_params=BARE)
@nox.parametrize("program", ["", "redis-server"], ids=["fake", "server"])
def redis(session: nox.Session, program: str) -> None:
    """Test collections on a server: one in the process of the tests, or a program that they start, kill and start again."""
    environment = Environment(
        session, (CORE, STORE, "td-tensorclass", "td-redis"), extra=("fakeredis", "lupa")
    )
    environment.pytest(
        "packages/td-redis/tests", *session.posargs, **({"TD_REDIS_SERVER": program} if program else {})
    )


@nox.session(venv_params=BARE)
def model(session: nox.Session) -> None:
    """Run random programs on collections in files, 2,000 or the number that is passed, and compare with memory."""
    environment = Environment(session, EVERYTHING)
    count, *others = session.posargs or ["2000"]
    programs = {"TD_MODEL_PROGRAMS": str(-(-int(count) // WORKERS)), "TD_MODEL_SEED": "0"}
    if can(environment.base, "import xdist"):
        # Each worker runs the same tests with a seed of its own.
        others = ["-n", str(WORKERS), "--dist", "each", *others]
    environment.pytest("tests/model", *others, **programs)


@nox.session(venv_params=BARE)
def clients(session: nox.Session) -> None:
    """Run public programs that use tensordict with both, and trainers with collections; print skips and times.

    TorchRL and others ask for older releases of tensordict, so their dependencies are not resolved, but listed. Needs Python
    3.11, as some of them do.
    """
    environment = Environment(session, EVERYTHING, extra=(REFERENCE, "fakeredis", "lupa"))
    environment.install("--no-deps", "-r", "tests/clients/requirements.txt")
    environment.pytest("tests/clients", "-rs", "--durations=0", "--durations-min=1", *session.posargs)
    environment.pytest("tests/test_distributed_examples.py", "-k", "ray")


@nox.session(venv_params=BARE)
def demo(session: nox.Session) -> None:
    """Run the demo on handwritten digits: data set on disk, training, saving, ensemble, second process."""
    environment = Environment(session, EVERYTHING, extra=("scikit-learn", "matplotlib", "tqdm"))
    environment.run("examples/digits_demo.py", *session.posargs)


@nox.session(venv_params=BARE)
def docs(session: nox.Session) -> None:
    """Run all examples in the documentation, then build it; a warning is an error."""
    environment = Environment(
        session,
        EVERYTHING,
        extra=("mkdocs-material", "mkdocstrings[python]", "ruff", "xarray", "einops", "fakeredis", "lupa"),
    )
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
    environment.pytest("--doctest-glob=*.md", *pages)
    # The stand-in for tensordict changes rules of the process when it is imported.
    environment.pytest("--doctest-modules", "--ignore-glob=*/_stand_in/*", "--pyargs", *MODULES.values())
    site = Path(session.create_tmp()).resolve() / "site"
    environment.run("-m", "mkdocs", "build", "--strict", "--site-dir", site, NO_MKDOCS_2_WARNING="1")


@nox.session(venv_params=BARE)
def bench(session: nox.Session) -> None:
    """Run the benchmarks against tensordict. No time makes a benchmark fail."""
    environment = Environment(session, EVERYTHING, extra=(REFERENCE,))
    for script in sorted(ROOT.glob("benchmarks/bench_*.py")):
        environment.run(script)
    environment.run("benchmarks/nn.py")
    environment.run("benchmarks/stores.py")
    environment.run("benchmarks/tables.py")
    environment.run("benchmarks/ops.py", *session.posargs)


@nox.session(venv_params=BARE)
def comparison(session: nox.Session) -> None:
    """Compare the packages with tensordict, and write the results to ``docs/comparison.md``."""
    environment = Environment(session, EVERYTHING, extra=(REFERENCE,))
    environment.run("benchmarks/comparison.py", *session.posargs)
