"""Write ``td_core/plugins/methods.pyi``: the signatures of the methods that packages of the project provide.

    python tools/generate_stub.py          write the stub
    python tools/generate_stub.py --check  exit with 1 if it differs from what would be written

The names are those of ``PROVIDED`` in ``siblings.py``. The hook ``td_methods`` of a package has the function of each name,
from which the stub takes signature and first sentence. The tool reads sources and imports none of them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "packages/td-core/src/td_core/plugins"
STUB = PLUGINS / "methods.pyi"
WIDTH = 110
HEAD = '''"""The methods that packages of the project provide; tools/generate_stub.py writes this file."""

{imports}

class DeclaredMethods:
'''


class Function:
    """A function that is a method: the node of its source, its kind, and the imports of its module."""

    def __init__(self, name: str, kind: str, path: Path) -> None:
        self.name = name
        self.kind = kind
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.node = next(
            node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name
        )

    def imports(self) -> dict[str, str]:
        """Return the import statement of each name that the module imports from elsewhere, without dots."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                source = f"{node.module}".replace("td_core.", "..")
                found |= {each.name: f"from {source} import {each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                found |= {each.name: f"import {each.name}" for each in node.names}
        return found

    def own_names(self) -> set[str]:
        """Return the names of classes that the package has, and the stub cannot import."""
        names = {node.name for node in self.tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                names |= {each.name for each in node.names}
        return names

    def write(self) -> tuple[str, set[str]]:
        """Return the text of the method, and the names that its annotations use."""
        arguments, own = self.node.args, "self"
        new = dict.fromkeys(self.own_names(), "Any")
        if self.kind == "make_classmethod":
            own, self.node.returns = "cls", ast.Name("Self")
        else:
            first = arguments.args.pop(0)
            if first.annotation is not None and ast.unparse(first.annotation).endswith("T"):
                new[ast.unparse(first.annotation)] = "Self"
        arguments = Renamed(new).visit(arguments)
        returns = Renamed(new).visit(self.node.returns or ast.Name("None"))
        names = {
            node.id
            for part in (*iter_annotations(arguments), returns)
            for node in ast.walk(part)
            if isinstance(node, ast.Name)
        }
        lines = wrap(self.name, [own, *iter_parameters(arguments)], ast.unparse(returns))
        decorator = {"make_classmethod": ["@classmethod"], "property": ["@property"]}.get(self.kind, [])
        sentence = (ast.get_docstring(self.node) or "").splitlines()[0].partition(". ")[0].rstrip(".") + "."
        return "\n".join(f"    {line}" for line in [*decorator, *lines, f'    """{sentence}"""']), names


class Renamed(ast.NodeTransformer):
    """Rename the names of a mapping."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename one name."""
        return ast.Name(self.names.get(node.id, node.id))


def iter_annotations(arguments: ast.arguments) -> Iterator[ast.expr]:
    """Yield the annotations of all parameters."""
    for each in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if each is not None and each.annotation is not None:
            yield each.annotation


def iter_parameters(arguments: ast.arguments) -> Iterator[str]:
    """Yield the text of each parameter; a default that is not a literal is ``...``."""
    defaults: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    for each, default in zip(arguments.args, [*defaults, *arguments.defaults]):
        yield show(each, default)
    if arguments.kwonlyargs:
        yield "*"
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        yield show(each, default)
    if arguments.kwarg is not None:
        yield f"**{ast.unparse(arguments.kwarg)}"


def show(parameter: ast.arg, default: ast.expr | None) -> str:
    """Write a parameter with its annotation and default."""
    if default is None:
        return ast.unparse(parameter)
    is_literal = isinstance(default, ast.Constant)
    text = ast.unparse(default).replace("'", '"') if is_literal else "..."
    return f"{ast.unparse(parameter)} = {text}"


def wrap(name: str, parameters: list[str], returns: str) -> list[str]:
    """Write the head of a method in the form of ruff: on one line, else the parameters on one line, else on one each."""
    joined = ", ".join(parameters)
    if len(line := f"def {name}({joined}) -> {returns}:") <= WIDTH - 4:
        return [line]
    if len(joined) <= WIDTH - 8:
        return [f"def {name}(", f"    {joined}", f") -> {returns}:"]
    return [f"def {name}(", *(f"    {each}," for each in parameters), f") -> {returns}:"]


def read_provided() -> dict[str, tuple[str, ...]]:
    """Return the names of the methods of each package."""
    tree = ast.parse((PLUGINS / "siblings.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROVIDED":
            provided: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return provided
    raise ValueError("siblings.py has no PROVIDED")


def iter_functions(package: str) -> Iterator[Function]:
    """Yield the functions in the dict that the hook ``td_methods`` of a package returns."""
    module = package.replace("-", "_")
    plugin = ROOT / "packages" / package / "src" / module / "plugin.py"
    tree = ast.parse(plugin.read_text(encoding="utf-8"))
    places = {
        each.name: plugin.with_name(f"{node.module}.py")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for each in node.names
    }
    hook = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "td_methods")
    table = next(node for node in ast.walk(hook) if isinstance(node, ast.Dict))
    for key, value in zip(table.keys, table.values):
        if key is not None and ast.literal_eval(key).startswith("__"):
            continue  # other libraries call it, users do not
        kind = ast.unparse(value.func) if isinstance(value, ast.Call) else "function"
        name = ast.unparse(value.args[0] if isinstance(value, ast.Call) else value)
        yield Function(name, kind, places.get(name, plugin))


def make_stub() -> str:
    """Return the text of the stub."""
    methods, statements = [], set()
    for package, names in read_provided().items():
        found = {each.name: each for each in iter_functions(package)}
        if found.keys() != set(names):
            raise ValueError(f"{package} provides {sorted(found)}; PROVIDED names {sorted(names)}")
        for name in names:
            text, used = found[name].write()
            methods.append(text)
            imports = {
                "Self": "from typing_extensions import Self",
                "Any": "from typing import Any",
                **found[name].imports(),
            }
            statements |= {imports[each] for each in used if each in imports}
    return HEAD.format(imports="\n".join(sort_imports(statements))) + "\n".join(methods) + "\n"


def sort_imports(statements: set[str]) -> Iterator[str]:
    """Yield import statements in the order of ruff, one for each module."""
    names: dict[str, list[str]] = {}
    for statement in sorted(statements):
        source, _, name = statement.partition(" import ")
        names.setdefault(source, []).append(name)
    plain = [f"{source} import {', '.join(each)}" if each[0] else source for source, each in names.items()]
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for line in sorted(plain, key=lambda line: (line.startswith("from"), line)):
        module = line.split()[1]
        groups[2 if module[0] == "." else module.split(".")[0] not in sys.stdlib_module_names].append(line)
    yield from "\n\n".join("\n".join(group) for group in groups if group).splitlines()


def main() -> int:
    """Write the stub, or compare it."""
    text = make_stub()
    if "--check" not in sys.argv:
        STUB.write_text(text, encoding="utf-8")
        return 0
    if not STUB.exists() or STUB.read_text(encoding="utf-8") != text:
        print(f"{STUB.relative_to(ROOT)} differs from the packages: run python tools/generate_stub.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
