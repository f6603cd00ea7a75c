"""CompositeDistribution: independent distributions, each at a key of a collection."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NoReturn, TypeVar, Union

import torch
from torch import Tensor
from torch import distributions as dist

from td_core import TensorCollection, TensorDict, unravel_key
from td_core.spi import RULES
from td_core.typing import BatchSize, NestedKey

from ._aggregate import composite_lp_aggregate
from ._distribution_values import compute_deterministic_value, rsample
from ._module import missing_keys, show_missing
from ._module_keys import Key, store_outputs
from .module_errors import MissingKeyError, ModuleKeysError

NO_SHAPE = torch.Size()

#: Log-probabilities or entropies of a component: a collection if the component is a composite.
Scores = Union[Tensor, TensorCollection]  # noqa: UP007

Component = TypeVar("Component")


def add_suffix(key: Key, suffix: str) -> Key:
    """Append a suffix to the last element of a key."""
    return key + suffix if isinstance(key, str) else (*key[:-1], key[-1] + suffix)


class CompositeDistribution(dist.Distribution):
    """Independent distributions, one per key, whose samples are collections.

    It is also a mapping from sample keys to distributions.

    Args:
        params: a collection with the keyword arguments of each distribution, under the name of the component. Its batch
            size is the batch shape.
        distribution_map: a dict from the name of each component to a class, or a function that returns a distribution.
        name_map: a dict from names to sample keys, for components whose sample key is not their name.
        extra_kwargs: a dict from names to more keyword arguments of the distribution.
        log_prob_key: key of the sum of the log-probabilities; ``"sample_log_prob"`` by default.
        entropy_key: key of the sum of the entropies; ``"entropy"`` by default.
        aggregate: True sums log-probabilities and entropies over components and event dims; False keeps one entry per
            component. By default, :func:`composite_lp_aggregate` decides at each call.

    Raises:
        TypeError: ``params`` is not a collection, or an argument is in ``params`` and in ``extra_kwargs``.
        MissingKeyError: a component has no entry in ``params``.
        ModuleKeysError: a map names a component that does not exist, or two components have the same sample key.

    >>> from torch.distributions import Categorical, Normal
    >>> params = TensorDict({
    ...     "move": {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
    ...     "jump": {"logits": torch.zeros(3, 4)},
    ... }, batch_size=[3])
    >>> both = CompositeDistribution(
    ...     params,
    ...     {"move": Normal, "jump": Categorical},
    ...     name_map={"jump": ("n", "jump")},
    ... )
    >>> both.sample()["n", "jump"].shape
    torch.Size([3])
    >>> sorted(both.log_prob(both.sample()).keys(True, True), key=str)
    [('n', 'jump_log_prob'), 'move_log_prob']
    >>> move = CompositeDistribution(params, {"move": Normal}, aggregate=True)
    >>> move.log_prob(both.sample()).shape
    torch.Size([3])
    """

    arg_constraints: dict[str, dist.constraints.Constraint] = {}  # noqa: RUF012  torch declares it as a dict

    def __init__(
        self,
        params: TensorCollection,
        distribution_map: Mapping[Any, Callable[..., dist.Distribution]],
        *,
        name_map: Mapping[Any, NestedKey] | None = None,
        extra_kwargs: Mapping[Any, Mapping[str, object]] | None = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        aggregate: bool | None = None,
    ) -> None:
        _check_params(params)
        classes = {unravel_key(name): cls for name, cls in distribution_map.items()}
        extra = {unravel_key(name): kwargs for name, kwargs in (extra_kwargs or {}).items()}
        _refuse_unknown(extra, classes, "extra_kwargs")
        dists = {
            name: _build(name, cls, _read_arguments(params, name), extra.get(name))
            for name, cls in classes.items()
        }
        self._set_up(params, rename_components(dists, name_map), log_prob_key, entropy_key, aggregate)

    @classmethod
    def from_distributions(
        cls,
        params: TensorCollection,
        distributions: Mapping[Any, dist.Distribution],
        *,
        name_map: Mapping[Any, NestedKey] | None = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        aggregate: bool | None = None,
    ) -> CompositeDistribution:
        """Build a composite from existing distributions.

        Args:
            params: a collection whose batch size is the batch shape.
            distributions: a dict from the name of each component to its distribution.
            name_map: a dict from names to sample keys, for components whose sample key is not their name.
            log_prob_key: key of the sum of the log-probabilities.
            entropy_key: key of the sum of the entropies.
            aggregate: see the class.

        >>> from torch.distributions import Normal
        >>> unit = Normal(torch.zeros(2), torch.ones(2))
        >>> composite = CompositeDistribution.from_distributions(
        ...     TensorDict(batch_size=[2]), {"x": unit}
        ... )
        >>> composite["x"] is unit
        True
        """
        _check_params(params)
        new = cls.__new__(cls)
        named = {unravel_key(name): each for name, each in distributions.items()}
        new._set_up(params, rename_components(named, name_map), log_prob_key, entropy_key, aggregate)
        return new

    def _set_up(
        self,
        params: TensorCollection,
        dists: dict[Key, dist.Distribution],
        log_prob_key: NestedKey | None,
        entropy_key: NestedKey | None,
        aggregate: bool | None,
    ) -> None:
        super().__init__(params.batch_size, NO_SHAPE, validate_args=False)
        self.dists = dists
        self.log_prob_key = log_prob_key
        self.entropy_key = entropy_key
        self.aggregate = aggregate

    @property
    def log_prob_key(self) -> Key:
        """Key of the sum of the log-probabilities; assigning None restores ``"sample_log_prob"``."""
        return self._log_prob_key

    @log_prob_key.setter
    def log_prob_key(self, key: NestedKey | None) -> None:
        self._log_prob_key: Key = "sample_log_prob" if key is None else unravel_key(key)

    @property
    def entropy_key(self) -> Key:
        """Key of the sum of the entropies; assigning None restores ``"entropy"``."""
        return self._entropy_key

    @entropy_key.setter
    def entropy_key(self, key: NestedKey | None) -> None:
        self._entropy_key: Key = "entropy" if key is None else unravel_key(key)

    def _is_aggregating(self) -> bool:
        return composite_lp_aggregate() if self.aggregate is None else self.aggregate

    def __getitem__(self, key: Key) -> dist.Distribution:
        return self.dists[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.dists)

    def __len__(self) -> int:
        return len(self.dists)

    def __contains__(self, key: object) -> bool:
        return key in self.dists

    def keys(self) -> KeysView[Key]:
        """Return the sample keys."""
        return self.dists.keys()

    def values(self) -> ValuesView[Any]:
        """Return the distributions of the components."""
        return self.dists.values()

    def items(self) -> ItemsView[Key, Any]:
        """Return pairs of a sample key and a distribution."""
        return self.dists.items()

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the distribution at a sample key, or the default."""
        return self.dists.get(key, default)

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """True if all components can draw samples with gradients; in programs of tensordict always False.

        A gradient through a sample would change the gradient of its log-probability.
        """
        return not RULES.follows_tensordict and all(each.has_rsample for each in self.dists.values())

    def _collect(
        self, call: Callable[[dist.Distribution], object], shape: torch.Size = NO_SHAPE
    ) -> TensorDict:
        """Call a function for each component, and return the results at the sample keys."""
        values = {key: call(each) for key, each in self.dists.items()}
        return TensorDict(values, batch_size=shape + self._batch_shape)

    def sample(self, shape: BatchSize | None = None) -> TensorDict:  # type: ignore[override]
        """Draw a collection of batch size ``shape + batch_shape``, without gradients."""
        size = _as_size(shape)
        return self._collect(lambda each: each.sample(size), size)

    def rsample(self, shape: BatchSize | None = None) -> TensorDict:  # type: ignore[override]
        """Draw a collection of batch size ``shape + batch_shape``, with gradients.

        Raises:
            NotImplementedError: a component cannot draw with gradients.
        """
        size = _as_size(shape)
        return self._collect(lambda each: rsample(each, size), size)

    @property
    def mode(self) -> TensorDict:  # type: ignore[override]
        """The mode of each component, at its sample key."""
        return self._collect(lambda each: _read_statistic(each, "mode"))

    @property
    def mean(self) -> TensorDict:  # type: ignore[override]
        """The mean of each component, at its sample key."""
        return self._collect(lambda each: _read_statistic(each, "mean"))

    @property
    def deterministic_sample(self) -> TensorDict:
        """The deterministic value of each component, see :class:`ProbabilisticTensorDictModule`.

        Raises:
            NotImplementedError: a component has no deterministic value.
        """
        return self._collect(compute_deterministic_value)

    def sample_and_log_prob(self, shape: BatchSize | None = None) -> tuple[TensorDict, Any]:
        """Draw without gradients, and return the samples with their log-probability, as ``log_prob()`` does."""
        return self._draw_and_lay_out("sample", _as_size(shape))

    def rsample_and_log_prob(self, shape: BatchSize | None = None) -> tuple[TensorDict, Any]:
        """Draw with gradients, and return the samples with their log-probability, as ``log_prob()`` does."""
        return self._draw_and_lay_out("rsample", _as_size(shape))

    def _draw_and_lay_out(self, method: str, shape: torch.Size) -> tuple[TensorDict, Tensor | TensorDict]:
        values, scores = self.draw_and_score(method, shape)
        size = shape + self._batch_shape
        return TensorDict(values, batch_size=size), self._lay_out(scores, size)

    def draw_and_score(self, method: str, shape: torch.Size) -> tuple[dict[Key, Scores], dict[Key, Scores]]:
        """Draw with ``sample`` or ``rsample``, and return samples and log-probabilities by sample key.

        Args:
            method: ``"sample"`` or ``"rsample"``.
            shape: leading dims of the samples.
        """
        values: dict[Key, Scores] = {}
        scores: dict[Key, Scores] = {}
        for key, each in self.dists.items():
            both = getattr(each, f"{method}_and_log_prob", None)
            if both is None:
                drawn = rsample(each, shape) if method == "rsample" else each.sample(shape)
                values[key], scores[key] = drawn, each.log_prob(drawn)
            else:
                values[key], scores[key] = both(shape)
        return values, scores

    def _lay_out(self, scores: dict[Key, Scores], size: torch.Size) -> Tensor | TensorDict:
        """Return the sum of log-probabilities if they are aggregated, else a collection with one entry per key."""
        if self._is_aggregating():
            return self.sum_scores(scores, size)
        return _add_suffixes(scores, "_log_prob", size)

    def sum_scores(self, scores: Mapping[Key, Scores], size: torch.Size) -> Tensor:
        """Sum log-probabilities or entropies over the components, and over the dims of each after the batch shape.

        Args:
            scores: the log-probability or entropy of each component, by sample key.
            size: the batch size of the sample, which counts if it has more dims than the batch shape.
        """
        dims = len(self._batch_shape)
        kept = max(len(size), dims)
        total: Any = 0
        for key, each in self.dists.items():
            score: Any = scores[key]
            own = len(getattr(each, "batch_shape", ()))
            if isinstance(score, TensorCollection):  # the component is a composite
                inner = max(own, score.batch_dims)
                score = sum(_sum_last(leaf, leaf.ndim - inner) for leaf in score.values(True, True))
            spare = score.ndim - kept
            # A class without a batch shape does not tell the dims of its features from those of the sample.
            total = total + _sum_last(score, min(own - dims, spare) if 0 < own >= dims else spare)
        result: Tensor = total
        return result

    def score(self, sample: TensorCollection) -> dict[Key, Scores]:
        """Return the log-probability of each component, by sample key.

        Raises:
            MissingKeyError: the sample has no value for a component.
        """
        scores: dict[Key, Scores] = {}
        for key, each in self.dists.items():
            value = sample.get(key, None)
            if value is None:
                missing = missing_keys(sample, tuple(self.dists))
                raise MissingKeyError(type(self).__name__, show_missing(sample, missing), missing)
            scores[key] = each.log_prob(value)
        return scores

    def log_prob(self, sample: TensorCollection) -> Any:  # type: ignore[override]
        """Return the log-probability of a collection.

        Args:
            sample: a collection of batch size (..., *batch_shape) with the values; other entries are not read.

        Returns:
            If log-probabilities are aggregated, a tensor of shape (..., *batch_shape): the sum over components and event
            dims, also if ``sample`` has fewer batch dims. Else a TensorDict with one entry per component, at its sample
            key with the suffix ``_log_prob``.
        """
        return self._lay_out(self.score(sample), sample.batch_size)

    def log_prob_composite(
        self, sample: TensorCollection, *, include_sum: bool | None = None
    ) -> TensorCollection:
        """Return the log-probability of each component, at its sample key with the suffix ``_log_prob``.

        Args:
            sample: a collection with the values.
            include_sum: True also returns the sum over components and event dims, at ``log_prob_key``. By default, this
                is so if log-probabilities are aggregated.

        Returns:
            A new TensorDict. If :class:`set_composite_lp_aggregate` is on and the composite was built without
            ``aggregate``, the entries are written into ``sample``, which is returned.
        """
        scores = self.score(sample)
        is_summed = self._is_aggregating()
        found = {add_suffix(key, "_log_prob"): value for key, value in scores.items()}
        if is_summed if include_sum is None else include_sum:
            found[self.log_prob_key] = self.sum_scores(scores, sample.batch_size)
        if is_summed and self.aggregate is None:
            return _write(sample, found)
        return TensorDict(found, batch_size=sample.batch_size)

    def entropy(self, samples_mc: int = 1, *, include_sum: bool | None = None) -> Any:
        """Return the entropy.

        tensordict's argument ``aggregate_probabilities`` does not exist: build the composite with ``aggregate=``.

        Args:
            samples_mc: number of draws that estimate the entropy of a component without a closed form.
            include_sum: True also returns the sum, at ``entropy_key``; without effect if entropies are aggregated, since
                the result is the sum then.

        Returns:
            A tensor of the batch shape if entropies are aggregated. Else a TensorDict with one entry per component, at its
            sample key with the suffix ``_entropy``.
        """
        entropies = self._compute_entropies(samples_mc)
        if self._is_aggregating():
            return self.sum_scores(entropies, self._batch_shape)
        return self._lay_out_entropies(entropies, bool(include_sum))

    def entropy_composite(self, samples_mc: int = 1, *, include_sum: bool | None = None) -> TensorDict:
        """Return the entropy of each component, at its sample key with the suffix ``_entropy``.

        Args:
            samples_mc: number of draws that estimate the entropy of a component without a closed form.
            include_sum: True also returns the sum, at ``entropy_key``. By default, this is so if entropies are aggregated.
        """
        entropies = self._compute_entropies(samples_mc)
        return self._lay_out_entropies(
            entropies, self._is_aggregating() if include_sum is None else include_sum
        )

    def _compute_entropies(self, samples_mc: int) -> dict[Key, Scores]:
        return {key: _compute_entropy(each, samples_mc) for key, each in self.dists.items()}

    def _lay_out_entropies(self, entropies: dict[Key, Scores], has_sum: bool) -> TensorDict:
        found = _add_suffixes(entropies, "_entropy", self._batch_shape)
        if has_sum:
            found.set(self.entropy_key, self.sum_scores(entropies, self._batch_shape))
        return found

    def cdf(self, sample: TensorCollection) -> TensorCollection:  # type: ignore[override]
        """Write the cumulative probability of each component into ``sample``, at its key with the suffix ``_cdf``.

        Returns:
            ``sample``.
        """
        found = {}
        for key, each in self.dists.items():
            found[add_suffix(key, "_cdf")] = each.cdf(_read_value(self, sample, key))
        return _write(sample, found)

    def icdf(self, sample: TensorCollection) -> TensorCollection:  # type: ignore[override]
        """Write the inverse cumulative probability of each component into ``sample``, at its key with ``_icdf`` appended.

        The probability of a component is read at its sample key with the suffix ``_cdf``. If there is none, it is computed
        from the value at the sample key.

        Returns:
            ``sample``.

        Raises:
            MissingKeyError: ``sample`` has neither the probability nor the value of a component.
        """
        found = {}
        for key, each in self.dists.items():
            share_key = add_suffix(key, "_cdf")
            share = sample.get(share_key, None)
            if share is None:
                share = each.cdf(_read_value(self, sample, key, share_key))
            found[add_suffix(key, "_icdf")] = each.icdf(share)
        return _write(sample, found)

    def _statistic_error(self, name: str) -> NotImplementedError:
        return NotImplementedError(
            f"a CompositeDistribution has no {name}; read it from a component, composite[key].{name}"
        )

    @property
    def median(self) -> NoReturn:
        """Raise NotImplementedError; read it from a component instead."""
        raise self._statistic_error("median")

    @property
    def variance(self) -> NoReturn:
        """Raise NotImplementedError; read it from a component instead."""
        raise self._statistic_error("variance")

    @property
    def support(self) -> NoReturn:
        """Raise NotImplementedError; read it from a component instead."""
        raise self._statistic_error("support")

    def expand(self, batch_shape: object, _instance: object = None) -> NoReturn:
        """Raise NotImplementedError; expand the parameters instead."""
        raise NotImplementedError(
            "a CompositeDistribution does not expand; expand its params and build it from these"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dists})"


# Mapping is registered instead of inherited, because isinstance() with an abstract base class is slow.
Mapping.register(CompositeDistribution)


def _check_params(params: object) -> None:
    if not isinstance(params, TensorCollection):
        raise TypeError(
            "the params of a CompositeDistribution are a collection with an entry per component; "
            f"got a {type(params).__name__}"
        )


def _refuse_unknown(names: Iterable[Key], known: Collection[Key], where: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown and not RULES.follows_tensordict:
        raise ModuleKeysError(
            f"{where} has {', '.join(map(repr, unknown))}, which is not the name of a component; "
            f"the components are {list(known)}"
        )


def rename_components(
    dists: Mapping[Key, Component], name_map: Mapping[Any, NestedKey] | None
) -> dict[Key, Component]:
    """Replace the names of components by their sample keys; ModuleKeysError if a name does not exist, or a key is repeated."""
    if not name_map:
        return dict(dists)
    keys = {unravel_key(name): unravel_key(key) for name, key in name_map.items()}
    _refuse_unknown(keys, dists, "name_map")
    renamed = {keys.get(name, name): each for name, each in dists.items()}
    if len(renamed) < len(dists):
        chosen = [keys.get(name, name) for name in dists]
        twice = next(key for key in chosen if chosen.count(key) > 1)
        same = [name for name, key in zip(dists, chosen) if key == twice]
        raise ModuleKeysError(f"the components {same} have one sample key, {twice!r}; each needs its own")
    return renamed


def _read_arguments(params: TensorCollection, name: Key) -> Mapping[str, object]:
    """Read the keyword arguments of a component."""
    node = params.get(name, None)
    if node is None:
        problem = show_missing(params, [name]).replace("its input", "the parameters", 1)
        raise MissingKeyError("CompositeDistribution", problem, [name])
    if isinstance(node, Tensor):
        raise TypeError(
            f"the parameters of the component {name!r} are a collection of keyword arguments; got a tensor of shape "
            f"{list(node.shape)}"
        )
    if isinstance(node, TensorCollection):
        found = {
            key: value if isinstance(value, Tensor) else node[key]  # node[key] returns a value, not its node
            for key, value in node.items()
        }
        if found:
            return found
        node = params[name]  # params[name] returns a value, such as a dict, not its node
        return dict(node)
    return node  # type: ignore[no-any-return]


def _build(
    name: Key,
    cls: Callable[..., dist.Distribution],
    arguments: Mapping[str, object],
    extra: Mapping[str, object] | None,
) -> dist.Distribution:
    if not extra:
        return cls(**arguments)
    twice = sorted(arguments.keys() & extra.keys())
    if twice:
        raise TypeError(
            f"the component {name!r} has {', '.join(twice)} in params and in extra_kwargs; give each argument once"
        )
    return cls(**arguments, **extra)


def _read_value(
    composite: CompositeDistribution, sample: TensorCollection, key: Key, other: Key | None = None
) -> Any:
    value = sample.get(key, None)
    if value is None:
        missing = [key] if other is None else [other, key]
        raise MissingKeyError(type(composite).__name__, show_missing(sample, missing), missing)
    return value


def _as_size(shape: BatchSize | None) -> torch.Size:
    if shape is None:
        return NO_SHAPE
    return torch.Size([shape]) if isinstance(shape, int) else torch.Size(shape)


def _read_statistic(each: dist.Distribution, name: str) -> object:
    """Read the mean or the mode of a component."""
    try:
        return getattr(each, name)
    except (AttributeError, NotImplementedError):
        raise NotImplementedError(
            f"{type(each).__name__}, a component of the CompositeDistribution, has no {name}"
        ) from None


def _add_suffixes(values: Mapping[Key, object], suffix: str, size: torch.Size) -> TensorDict:
    return TensorDict({add_suffix(key, suffix): value for key, value in values.items()}, batch_size=size)


def _sum_last(score: Tensor, count: int) -> Tensor:
    """Sum over the last ``count`` dims, if there are any."""
    return score.sum(tuple(range(-count, 0))) if count > 0 else score


def _compute_entropy(each: dist.Distribution, samples_mc: int) -> Scores:
    """Return the entropy of a component, estimated from draws if it has no closed form."""
    try:
        return each.entropy()
    except NotImplementedError:
        shape = torch.Size([samples_mc])
        drawn = each.rsample(shape) if each.has_rsample else each.sample(shape)
        return -each.log_prob(drawn).mean(0)


def _write(sample: TensorCollection, found: Mapping[Key, object]) -> TensorCollection:
    store_outputs(sample, found, found.values())
    return sample
