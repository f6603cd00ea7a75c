"""ProbabilisticTensorDictModule: build a distribution from entries of a collection and store its samples there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributions import Distribution

from td_core import TensorCollection, TensorDict
from td_core.spi import RULES
from td_core.typing import NestedKey

from ._aggregate import composite_lp_aggregate
from ._composite import CompositeDistribution, add_suffix, rename_components
from ._delta import Delta
from ._dispatch import dispatch
from ._distribution_values import take_value
from ._generators import as_generator, draw_seed, draw_with, use_generator
from ._interaction import InteractionType
from ._module import missing_keys, show_missing
from ._module_base import ResultT, TensorDictModuleBase, show_module
from ._module_keys import SINK, Key, as_keys, is_related, read_outputs, store_outputs
from ._switches import STATE, has_outputs
from .module_errors import MissingKeyError, ModuleKeysError, SelectionError, note_place

NO_SHAPE = torch.Size()


class ProbabilisticTensorDictModule(TensorDictModuleBase[ResultT]):
    """A module that reads the parameters of a distribution from a collection and stores a sample in it.

    Args:
        in_keys: keys of the parameters; the last element of a key is the keyword of the distribution. Or a dict from
            keywords to keys.
        out_keys: keys of the samples. By default, a :class:`CompositeDistribution` stores samples at its sample keys, and
            the sample of another distribution is not stored.
        default_interaction_type: the value that a call stores if :func:`interaction_type` is None. ``RANDOM`` draws, with
            gradients if the distribution supports them. ``MODE``, ``MEDIAN`` and ``MEAN`` are the attributes of these
            names; if ``MEAN`` is not implemented, it is the average of ``n_empirical_estimate`` draws. ``DETERMINISTIC``
            is the attribute ``deterministic_sample`` if there is one. Else it is the mode for a Bernoulli, Binomial,
            Categorical or OneHotCategorical; the value of the base distribution for an ``Independent``, and the transform
            of it for a ``TransformedDistribution`` without a mean (the average of draws if the base has no such value);
            and the mean for the other torch distributions. For other classes the support decides, with a warning.
        distribution_class: class of the distribution, or a function that returns a distribution.
        distribution_kwargs: more keyword arguments of ``distribution_class``. Tensors move with the module; those of a
            TensorDictParams are also trained and saved.
        return_log_prob: True also stores the log-probability of the sample.
        log_prob_keys: list or tuple of the keys of the log-probabilities, one per sample key, if they are not aggregated; for
            a single sample, a tuple is one nested key. The default is the sample key with the suffix ``_log_prob``.
        log_prob_key: key of the log-probability of a single sample key, or of the aggregated log-probability; the default
            of the latter is ``"sample_log_prob"``.
        cache_dist: must be False: distributions are built at each call.
        n_empirical_estimate: number of draws that replace a mean.
        num_samples: number, or shape, of samples: a call returns a new collection with these leading batch dims.
        generator: a ``torch.Generator``, which each call advances; an integer that seeds one; or the key of a generator or
            an integer in the collection, where a call replaces the integer by a new seed. The global random state does
            not change. A compiled graph cannot use a generator, so ``torch.compile`` runs the module outside of graphs.
        aggregate: True sums the log-probabilities of the components of a composite, False keeps one per component. With
            either, :func:`composite_lp_aggregate` is not read, and only ``out_keys`` are written into a collection.

    Raises:
        ValueError: the interaction type does not exist, a log-probability key would overwrite a sample, or a keyword is
            not a string.
        RuntimeError: ``log_prob_key`` is given, but ``log_prob_keys`` applies, or the reverse.

    A call raises:
        MissingKeyError: a parameter is missing, and the distribution does not accept None for it.
        TypeError: the distribution does not have a parameter of that name.

    >>> from torch.distributions import Normal
    >>> policy = ProbabilisticTensorDictModule(
    ...     ["loc", "scale"],
    ...     ["action"],
    ...     distribution_class=Normal,
    ...     return_log_prob=True,
    ... )
    >>> data = policy(TensorDict(loc=torch.zeros(3), scale=torch.ones(3)))
    >>> data["action"], data["action_log_prob"]
    (tensor([0., 0., 0.]), tensor([-0.9189, -0.9189, -0.9189]))
    """

    _functions = ("distribution_class",)
    _CHANGE_IN_C_LP_A = (
        "composite_lp_aggregate() was {1} when this {0} was built and is {2} now, which changes its log-probability keys: "
        "build and use it under the same mode, or give it aggregate="
    )

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | Mapping[str, NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        *,
        default_interaction_type: InteractionType | str = InteractionType.DETERMINISTIC,
        distribution_class: Callable[..., Distribution] = Delta,
        distribution_kwargs: Mapping[str, Any] | None = None,
        return_log_prob: bool = False,
        log_prob_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey | None = None,
        cache_dist: bool = False,
        n_empirical_estimate: int = 1000,
        num_samples: int | torch.Size | tuple[int, ...] | None = None,
        generator: torch.Generator | int | NestedKey | None = None,
        aggregate: bool | None = None,
    ) -> None:
        super().__init__()
        if cache_dist and not RULES.follows_tensordict:  # without the cache, the results are the same
            raise ValueError("cache_dist=True is not supported: a distribution is built at each call")
        if not callable(distribution_class):
            raise TypeError(
                f"distribution_class is a class or a function that returns a distribution; got {distribution_class!r}"
            )
        if isinstance(in_keys, Mapping):
            wrong = [name for name in in_keys if not isinstance(name, str)]
            if wrong:
                raise ModuleKeysError(
                    "a dict of in_keys maps keywords of the distribution to keys, and a keyword is a string; "
                    f"got {', '.join(map(repr, wrong))}"
                )
            self.in_keys = list(in_keys.values())
            self.dist_keys = list(in_keys)
        else:
            self.in_keys = in_keys
            self.dist_keys = [key if isinstance(key, str) else key[-1] for key in self.in_keys]
        self.distribution_class = distribution_class
        self.distribution_kwargs = {} if distribution_kwargs is None else distribution_kwargs
        self._out_keys = self._choose_sample_keys(out_keys)
        self.default_interaction_type = InteractionType(default_interaction_type)
        self.return_log_prob = return_log_prob
        self.cache_dist = False
        self.n_empirical_estimate = n_empirical_estimate
        if isinstance(num_samples, int):
            num_samples = (num_samples,)
        self.num_samples = None if num_samples is None else torch.Size(num_samples)
        self.generator = self._convert_generator(generator)
        self._aggregate = aggregate
        self._composite_lp_aggreate_at_init = composite_lp_aggregate() if aggregate is None else aggregate
        self._log_prob_keys = self._choose_log_prob_keys(log_prob_key, log_prob_keys)

    def _choose_sample_keys(self, out_keys: Sequence[NestedKey] | None) -> list[Key]:
        """Return the sample keys; raise if a composite does not write one of ``out_keys``."""
        cls, kwargs = self.distribution_class, self.distribution_kwargs
        is_composite = isinstance(cls, type) and issubclass(cls, CompositeDistribution)
        names: list[Key] | None = None
        if is_composite and "distribution_map" in kwargs:
            components = dict.fromkeys(as_keys(list(kwargs["distribution_map"])))
            names = list(rename_components(components, kwargs.get("name_map")))
        if out_keys is not None:
            keys = list(as_keys(out_keys, "out_keys", known=names))
            if names is not None:
                self._refuse_unwritten(keys, names)
            return keys
        if is_composite and names is None:
            raise MissingKeyError(
                show_module(self),
                "has no out_keys: the sample keys of a CompositeDistribution are read from distribution_map in "
                "distribution_kwargs; give one of the two",
                ["distribution_map"],
            )
        return [SINK] if names is None else names

    def _refuse_unwritten(self, keys: list[Key], written: Collection[Key]) -> None:
        """Raise ModuleKeysError if a composite does not write one of the declared keys; programs of tensordict may do so."""
        if RULES.follows_tensordict:
            return
        never = [key for key in keys if key != SINK and key not in written]
        if never:
            raise ModuleKeysError(
                f"{show_module(self)} declares the out_keys {keys}, but its distribution writes {list(written)}; "
                "give name_map in distribution_kwargs to store a component at another key"
            )

    def _choose_log_prob_keys(
        self, log_prob_key: NestedKey | None, log_prob_keys: Sequence[NestedKey] | None
    ) -> list[Key]:
        is_summed = self._composite_lp_aggreate_at_init
        samples = self._out_keys
        if is_summed and log_prob_keys is not None:
            raise RuntimeError(
                "log_prob_keys are the keys of log-probabilities that are not aggregated, and composite_lp_aggregate is "
                "True here; give log_prob_key, the key of the sum"
            )
        if not is_summed and log_prob_key is not None and log_prob_keys is None and len(samples) > 1:
            raise RuntimeError(
                f"log_prob_key is one key for the {len(samples)} samples {samples}, and composite_lp_aggregate is False "
                "here; give log_prob_keys, one per sample, or aggregate=True to store the sum"
            )
        if log_prob_keys is not None:
            keys = list(as_keys(log_prob_keys, "log_prob_keys", count=len(samples)))
        elif log_prob_key is not None:
            keys = list(as_keys([log_prob_key], "log_prob_key"))
        elif is_summed:
            return ["sample_log_prob"]
        else:
            keys = [add_suffix(key, "_log_prob") for key in samples]
        if self.return_log_prob:
            self._refuse_overwriting(keys)
            self._refuse_one_for_many(keys)
        return keys

    def _refuse_overwriting(self, keys: list[Key]) -> None:
        """Raise ModuleKeysError if the log-probability under one of some keys would overwrite a sample."""
        for key in keys:
            over = [sample for sample in self._out_keys if sample == key or is_related(sample, key)]
            if over:
                raise ModuleKeysError(
                    f"the log-probability key {key!r} is equal to, inside or above the sample key {over[0]!r}, so "
                    "that writing it would overwrite the sample; choose another key"
                )

    def _refuse_one_for_many(self, keys: list[Key]) -> None:
        """Raise ModuleKeysError if a torch distribution, which has one log-probability, has several keys for it."""
        cls = self.distribution_class
        is_single = isinstance(cls, type) and cls.__module__.startswith("torch.distributions.")
        if len(keys) > 1 and is_single:
            raise ModuleKeysError(
                f"{show_module(self)} returns one log-probability for the samples {self._out_keys}; give log_prob_keys "
                "one key, or use a CompositeDistribution"
            )

    @property
    def distribution_kwargs(self) -> Any:
        """Keyword arguments of the distribution that are not read from collections."""
        if "distribution_kwargs" in self._modules:
            return self._modules["distribution_kwargs"]
        if not self._kwarg_buffers:
            return self._kwargs
        kwargs = _copy_dicts(self._kwargs)
        for (*path, name), buffer in self._kwarg_buffers.items():
            functools.reduce(dict.__getitem__, path, kwargs)[name] = self._buffers[buffer]
        return kwargs

    @distribution_kwargs.setter
    def distribution_kwargs(self, kwargs: Any) -> None:
        # Tensors become buffers, so that they move with the module. nn.Module stores a TensorDictParams as a submodule.
        self._kwarg_buffers: dict[tuple[str, ...], str] = {}
        if RULES.follows_tensordict:  # programs change the dict later, and find no buffers
            self._kwargs = kwargs
            return
        self._kwargs = self._register_tensors({name: kwargs[name] for name in list(kwargs.keys())}, ())

    def _register_tensors(self, kwargs: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                buffer = f"_kwarg_{len(self._kwarg_buffers)}"
                self.register_buffer(buffer, value, persistent=False)
                full = (*path, name)
                self._kwarg_buffers[full] = buffer
            nested = type(value) is dict
            kept[name] = self._register_tensors(value, (*path, name)) if nested else value
        return kept

    @staticmethod
    def _convert_generator(
        generator: torch.Generator | int | NestedKey | None,
    ) -> torch.Generator | Key | None:
        """Convert the argument to a generator, a key or None."""
        if generator is None or isinstance(generator, torch.Generator):
            return generator
        if isinstance(generator, int) and not isinstance(generator, bool):
            return torch.Generator().manual_seed(generator)
        if isinstance(generator, (str, tuple)):
            return as_keys([generator], "generator")[0]
        raise TypeError(
            "generator is a torch.Generator, an integer that seeds one, the key of either, or None; "
            f"got a {type(generator).__name__}"
        )

    @property
    def _inner_module(self) -> Callable[..., Distribution]:
        return self.distribution_class

    @property
    def out_keys(self) -> list[Key]:
        """Keys of the samples, followed by those of the log-probabilities if ``return_log_prob``."""
        if not self.return_log_prob:
            return list(self._out_keys)
        self._refuse_other_mode()
        return self._out_keys + self._log_prob_keys

    @property
    def dist_sample_keys(self) -> list[Key]:
        """Keys of the samples."""
        return list(self._out_keys)

    @property
    def dist_params_keys(self) -> list[Key]:
        """Keys of the parameters."""
        keys: list[Key] = self.in_keys
        return keys

    @property
    def log_prob_keys(self) -> list[Key]:
        """Keys of the log-probabilities, even if ``return_log_prob`` is False."""
        self._refuse_other_mode()
        return list(self._log_prob_keys)

    @property
    def log_prob_key(self) -> Key:
        """Key of the log-probability.

        Raises:
            RuntimeError: there are several log-probability keys.
        """
        self._refuse_other_mode()
        if len(self._log_prob_keys) != 1:
            raise RuntimeError(
                f"{show_module(self)} has {len(self._log_prob_keys)} log-probability keys, {self._log_prob_keys}, because "
                "they are not aggregated; read log_prob_keys"
            )
        return self._log_prob_keys[0]

    def _refuse_other_mode(self) -> None:
        """Raise RuntimeError if ``composite_lp_aggregate()`` changed since construction."""
        if self._aggregate is None:
            now, then = composite_lp_aggregate(), self._composite_lp_aggreate_at_init
            if now is not then:
                raise RuntimeError(self._CHANGE_IN_C_LP_A.format(type(self).__name__, then, now))

    def select_out_keys(self, *out_keys: NestedKey) -> NoReturn:
        """Raise SelectionError; select keys of the sequence that contains the module instead."""
        raise SelectionError(
            f"{show_module(self)} writes its samples under all of its out_keys; "
            "call select_out_keys() of a TensorDictSequential that holds it"
        )

    def get_dist(self, tensordict: TensorCollection) -> Distribution:
        """Build the distribution from the parameters in a collection.

        Args:
            tensordict: collection with the parameters.

        >>> from torch.distributions import Normal
        >>> module = ProbabilisticTensorDictModule(
        ...     {"loc": "mu", "scale": "std"}, ["x"], distribution_class=Normal
        ... )
        >>> module.get_dist(TensorDict(mu=torch.zeros(2), std=torch.ones(2)))
        Normal(loc: torch.Size([2]), scale: torch.Size([2]))
        """
        values, get = {}, tensordict.get
        for name, key in zip(self.dist_keys, self._all_in_keys or ()):
            value = get(key, None)
            if not isinstance(value, Tensor) and value is not None:
                value = tensordict[key]  # [] returns a value, get() its node
            values[name] = value
        try:
            return self.distribution_class(**values, **self.distribution_kwargs)
        except Exception as error:
            self._explain(error, tensordict, values)
            raise

    def build_dist_from_params(self, tensordict: TensorCollection) -> Distribution:
        """Build the distribution, as :meth:`get_dist` does.

        >>> module = ProbabilisticTensorDictModule(["param"], ["x"])
        >>> module.build_dist_from_params(TensorDict(param=torch.ones(2))).mode
        tensor([1., 1.])
        """
        return self.get_dist(tensordict)

    def _explain(self, error: Exception, tensordict: TensorCollection, values: dict[str, object]) -> None:
        """Replace an error that a wrong key caused by MissingKeyError or TypeError; add a note to other errors."""
        missing = missing_keys(tensordict, self._all_in_keys or ())
        if missing:
            problem = show_missing(tensordict, missing).replace("its input", "its parameter", 1)
            raised = f"; {type(error).__name__}: {error}"
            raise MissingKeyError(show_module(self), problem + raised, missing) from error
        provided = dict(zip(self.dist_keys, self._all_in_keys or ()))
        twice = sorted(values.keys() & set(self.distribution_kwargs.keys()))
        known = _list_parameters(self.distribution_class)
        unknown = [name for name in values if known and name not in known]
        if isinstance(error, TypeError) and (twice or unknown):
            why = (
                f"{', '.join(twice)} is in in_keys and in distribution_kwargs"
                if twice
                else f"the distribution takes {known}, not {', '.join(unknown)}"
            )
            raise TypeError(f"{show_module(self)} got the keywords and keys {provided}: {why}") from error
        note_place(error, f"{show_module(self)}, which got the keywords and keys {provided}")

    def log_prob(self, tensordict: TensorCollection, *, dist: Distribution | None = None) -> Any:
        """Return the log-probability of the samples in a collection.

        The result of a CompositeDistribution is a TensorDict with one entry per component, or a tensor if log-probabilities
        are aggregated. If :class:`set_composite_lp_aggregate` is on, the entries are also written into ``tensordict``.

        Args:
            tensordict: collection with the samples, and with the parameters unless ``dist`` is given.
            dist: the distribution, if it was built before.

        Raises:
            MissingKeyError: a sample is missing.

        >>> module = ProbabilisticTensorDictModule(["param"], ["x"])
        >>> module.log_prob(TensorDict(param=torch.ones(2), x=torch.ones(2)))
        tensor(inf)
        """
        self._refuse_other_mode()
        if dist is None:
            dist = self.get_dist(tensordict)
        scores = self._score(dist, self._read_sample(tensordict, dist))
        if not isinstance(dist, CompositeDistribution):
            return scores
        if not self._composite_lp_aggreate_at_init:
            return TensorDict(self._rename_scores(scores), batch_size=tensordict.batch_size)
        total = dist.sum_scores(scores, tensordict.batch_size)
        if self._aggregate is None:
            store_outputs(tensordict, [add_suffix(key, "_log_prob") for key in scores], scores.values())
        return total

    def _read_sample(self, tensordict: TensorCollection, dist: Distribution) -> Any:
        """Read the sample from a collection: a collection for a composite, else a tensor or a tuple of tensors."""
        keys = list(dist) if isinstance(dist, CompositeDistribution) else self._out_keys
        values = [tensordict.get(key, None) for key in keys]
        missing = [key for key, value in zip(keys, values) if value is None]
        if missing:
            problem = show_missing(tensordict, missing).replace("its input", "the sample", 1)
            raise MissingKeyError(show_module(self), problem, missing)
        if isinstance(dist, CompositeDistribution):
            return TensorDict(dict(zip(keys, values)), batch_size=tensordict.batch_size)
        return values[0] if len(values) == 1 else tuple(values)

    def _score(self, dist: Distribution, sample: Any) -> Any:
        """Compute the log-probability of a sample; a dict by sample key for a composite."""
        if isinstance(dist, CompositeDistribution):
            return dist.score(sample)
        return dist.log_prob(*sample) if isinstance(sample, tuple) else dist.log_prob(sample)

    def _rename_scores(self, scores: dict[Key, Any]) -> dict[Key, Any]:
        """Replace the sample keys of log-probabilities by their output keys."""
        if len(self._log_prob_keys) != len(self._out_keys):
            raise ModuleKeysError(
                f"{show_module(self)} has the log_prob_keys {self._log_prob_keys} for the samples {self._out_keys}; "
                "give one per sample"
            )
        keys = dict(zip(self._out_keys, self._log_prob_keys))
        return {keys.get(key) or add_suffix(key, "_log_prob"): value for key, value in scores.items()}

    def _update_td_lp(self, lp: TensorCollection) -> TensorCollection:
        """Rename log-probabilities to ``log_prob_keys`` in place. Subclasses in other packages call this method."""
        for sample_key, new in zip(self._out_keys, self._log_prob_keys):
            old = add_suffix(sample_key, "_log_prob")
            if old != new:
                lp.set(new, lp.pop(old))
                while isinstance(old, tuple) and len(old) > 1 and lp.get(old[:-1]).is_empty():
                    old = old[:-1]
                    lp.pop(old)
        return lp

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None = None,
        _requires_sample: bool = True,
    ) -> TensorCollection:
        """Build the distribution and store a sample, and the log-probability if ``return_log_prob``.

        Args:
            tensordict: collection with the parameters.
            tensordict_out: collection that receives the results instead of ``tensordict``.
            _requires_sample: False draws nothing, and stores the log-probability of the samples in ``tensordict``.
        """
        if STATE.skip_existing is not False and has_outputs(
            STATE.skip_existing, tensordict, self._all_in_keys or (), self.out_keys
        ):
            return tensordict
        return self._store(tensordict, tensordict_out, self.get_dist(tensordict), _requires_sample)

    def _store(
        self,
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None,
        dist: Distribution,
        requires_sample: bool = True,
    ) -> TensorCollection:
        """Store a sample or statistic of a distribution; return the collection that has it."""
        scores = write_seed = None
        if self.return_log_prob:
            self._refuse_other_mode()
        if not requires_sample:
            sample = self._read_sample(tensordict, dist)
        elif self.generator is None:
            sample, scores = self._take_value(dist, self._read_interaction_type())
        else:
            sample, scores, write_seed = self._draw_with_generator(
                tensordict, dist, self._read_interaction_type()
            )
        target = tensordict if tensordict_out is None else tensordict_out
        if self.num_samples is not None and requires_sample:
            target = target.expand(self.num_samples + target.batch_size)
        self._write_outputs(target, dist, sample, scores)
        if write_seed is not None:
            write_seed()
        return target

    def _read_interaction_type(self) -> InteractionType:
        chosen: InteractionType | None = STATE.interaction_type
        return self.default_interaction_type if chosen is None else chosen

    def _take_value(self, dist: Distribution, kind: InteractionType) -> tuple[Any, Any]:
        """Return a sample or statistic, and its log-probability if the distribution computes both together, else None."""
        shape = NO_SHAPE if self.num_samples is None else self.num_samples
        if kind is InteractionType.RANDOM and self.return_log_prob:
            method = "rsample" if dist.has_rsample else "sample"
            if isinstance(dist, CompositeDistribution):
                return dist.draw_and_score(method, shape)
            both = getattr(dist, f"{method}_and_log_prob", None)
            if both is not None:
                drawn: tuple[Tensor, Tensor] = both(shape)
                return drawn
        return take_value(dist, kind, self.n_empirical_estimate, shape), None

    def _draw_with_generator(
        self, tensordict: TensorCollection, dist: Distribution, kind: InteractionType
    ) -> tuple[Any, Any, Callable[[], None] | None]:
        """Draw as ``_take_value`` does, with the generator. Also return a function that stores the next seed, if there is one."""
        if kind is not InteractionType.RANDOM:
            shape = NO_SHAPE if self.num_samples is None else self.num_samples
            try:
                return take_value(dist, kind, None, shape), None, None
            except NotImplementedError:
                if kind in (InteractionType.MODE, InteractionType.MEDIAN):
                    raise
        generator, writeback = self._resolve_generator(tensordict)
        sample, scores = draw_with(generator, lambda: self._take_value(dist, kind))
        if generator is None or writeback is None:
            return sample, scores, None
        return sample, scores, functools.partial(writeback, generator)

    def _resolve_generator(
        self, tensordict: TensorCollection
    ) -> tuple[torch.Generator | None, Callable[[torch.Generator], None] | None]:
        """Return the generator of a call, and a function that stores the next seed; None for each that is not needed."""
        source = self.generator
        if source is None or isinstance(source, torch.Generator):
            return source, None
        node = tensordict.get(source, None)
        if node is None:
            return None, None
        value = node if isinstance(node, Tensor) else tensordict[source]
        generator, is_seed = as_generator(value, source)

        def writeback(used: torch.Generator) -> None:
            seed = draw_seed(used, value)
            if isinstance(value, Tensor):
                tensordict.set(source, seed)
            else:
                tensordict.set_non_tensor(source, seed)

        return generator, writeback if is_seed else None

    def _dist_sample(
        self,
        dist: Distribution,
        interaction_type: InteractionType | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Return a sample or statistic of a distribution. Subclasses in other packages call this method."""
        kind = self._read_interaction_type() if interaction_type is None else interaction_type
        shape = NO_SHAPE if self.num_samples is None else self.num_samples
        with use_generator(generator):
            return take_value(dist, kind, self.n_empirical_estimate, shape)

    def _write_outputs(
        self, target: TensorCollection, dist: Distribution, sample: TensorCollection, scores: Any
    ) -> None:
        """Store a sample, and its log-probability if ``return_log_prob``, or neither if one does not fit."""
        keys = self._out_keys
        if isinstance(sample, Tensor) and len(keys) == 1 and not self.return_log_prob:
            if keys[0] != SINK:
                target.set(keys[0], sample)  # hot path: one sample
            return
        entries = self._name_samples(sample)
        if self.return_log_prob:
            scores = self._score(dist, sample) if scores is None else scores
            entries = {**dict(entries.items()), **self._name_scores(dist, scores, target.batch_size)}
        if isinstance(sample, (dict, TensorCollection)):
            target.update(entries)
        else:
            store_outputs(target, entries, entries.values())

    def _name_samples(self, sample: TensorCollection) -> Any:
        """Return the samples by key: a dict, or the collection that the distribution drew."""
        keys = self._out_keys
        if isinstance(sample, (dict, TensorCollection)):
            absent = [key for key in keys if key != SINK and key not in sample]
            if len(read_outputs(sample, absent)) < len(absent):
                written = sample if isinstance(sample, dict) else sample.keys(True, True)
                self._refuse_unwritten(keys, list(written))
            return sample
        if isinstance(sample, Tensor):
            sample = (sample,)
        if len(sample) != len(keys):
            raise ValueError(
                f"{show_module(self)} drew {len(sample)} values for the {len(keys)} out_keys {keys}; give one key per value"
            )
        return dict(zip(keys, sample))

    def _name_scores(self, dist: Distribution, scores: Any, size: torch.Size) -> dict[Key, Any]:
        """Return the log-probabilities of a sample by key."""
        keys = self._log_prob_keys
        if isinstance(scores, Tensor):
            scores = (scores,)
        elif isinstance(dist, CompositeDistribution):
            if not self._composite_lp_aggreate_at_init:
                return self._rename_scores(scores)
            found = {}
            if self._aggregate is None:
                found = {add_suffix(key, "_log_prob"): value for key, value in scores.items()}
            return {**found, keys[0]: dist.sum_scores(scores, size)}
        if len(scores) != len(keys):
            raise ModuleKeysError(
                f"{show_module(self)} returned {len(scores)} log-probabilities for the {len(keys)} log_prob_keys {keys}"
            )
        return dict(zip(keys, scores))

    def __repr__(self) -> str:
        keys = self._out_keys + (self._log_prob_keys if self.return_log_prob else [])
        return self._show(
            f"in_keys={self.in_keys},\nout_keys={keys},\ndistribution_class={self.distribution_class},\n"
            f"distribution_kwargs={dict(self.distribution_kwargs)},\n"
            f"default_interaction_type={self.default_interaction_type},\nnum_samples={self.num_samples}",
            ["distribution_class", "distribution_kwargs"],
        )


def _copy_dicts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copy a dict and the nested dicts."""
    return {name: _copy_dicts(value) if type(value) is dict else value for name, value in kwargs.items()}


def _list_parameters(cls: Callable[..., object]) -> list[str]:
    """List the parameters of a function; empty if it has ``**kwargs`` or no signature."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return []
    return (
        []
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        else [parameter.name for parameter in parameters]
    )
