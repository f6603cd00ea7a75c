"""ProbabilisticTensorDictSequential: a sequence of modules and distributions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributions import Distribution

from td_core import TensorCollection, TensorDict
from td_core.spi import RULES
from td_core.typing import NestedKey

from ._composite import CompositeDistribution, add_suffix
from ._dispatch import dispatch, share_dims
from ._interaction import InteractionType, interaction_type, set_interaction_type
from ._module import Inplace
from ._module_base import show_module
from ._module_keys import Key, store_outputs
from ._probabilistic import ProbabilisticTensorDictModule
from ._sequence import Members, TensorDictSequential, has_keys, run_on_members
from ._switches import STATE

if TYPE_CHECKING:
    from typing_extensions import Self


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """A sequence of modules and :class:`ProbabilisticTensorDictModule`, which can be used as one distribution.

    A call runs the members in order. If the last member is a distribution and earlier members write its samples, it does
    not draw. :meth:`get_dist` and :meth:`log_prob` condition each distribution on samples of the earlier ones: they use
    the samples in the collection and draw missing ones. Members of nested sequences are treated as members, too.

    Outside of :class:`set_interaction_type`, all members run under the default interaction type of the last distribution.
    If ``return_composite`` is True and the distributions have several types, each has its own, and other members see None.

    Args:
        *modules: the members; or one list of them; or one dict from names to members.
        partial_tolerant: True skips members whose inputs are missing, instead of raising an error.
        return_composite: True makes :meth:`get_dist` return a :class:`CompositeDistribution` of all distributions, False
            only the last distribution. By default, True if several members are distributions or the last member is not.
        selected_out_keys: the output keys to keep, see :meth:`select_out_keys`.
        inplace: see :class:`TensorDictSequential`.

    Raises:
        ValueError: no member is given.
        TypeError: ``return_composite`` is False and the last member is not a distribution.

    >>> from torch.distributions import Normal
    >>> from td_nn import NormalParamExtractor, TensorDictModule
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    >>> policy = ProbabilisticTensorDictSequential(
    ...     TensorDictModule(net, ["obs"], ["loc", "scale"]),
    ...     ProbabilisticTensorDictModule(
    ...         ["loc", "scale"], ["action"], distribution_class=Normal
    ...     ),
    ... )
    >>> data = policy(TensorDict(obs=torch.zeros(5, 3)))
    >>> policy.log_prob(data).shape
    torch.Size([5, 2])
    """

    #: The argument of the constructor. A class attribute, because subclasses in other packages may skip the constructor.
    _return_composite: bool | None = None

    #: Result of :meth:`_make_plan`, computed in the first call.
    _plan: tuple[list[ProbabilisticTensorDictModule], bool] | None = None

    def __init__(
        self,
        *modules: Members,
        partial_tolerant: bool = False,
        return_composite: bool | None = None,
        selected_out_keys: Sequence[NestedKey] | None = None,
        inplace: Inplace = None,
    ) -> None:
        # The next class of a diamond of bases may not accept this argument, so it is passed only if it is set.
        selected = {} if selected_out_keys is None else {"selected_out_keys": selected_out_keys}
        super().__init__(*modules, partial_tolerant=partial_tolerant, inplace=inplace, **selected)
        self._return_composite = return_composite
        self._refuse_members(list(self))

    def _refuse_members(self, members: list[object]) -> None:
        """Raise if there are no members, or if ``return_composite`` is False and the last is not a distribution."""
        if not members:
            raise ValueError(f"a {type(self).__name__} needs at least one member; got none")
        if self._return_composite is False and not is_probabilistic(members[-1]):
            raise TypeError(
                f"the last member of a {type(self).__name__} with return_composite=False is a "
                f"ProbabilisticTensorDictModule or a {type(self).__name__}; got a {show_module(members[-1])}"
            )

    def _replace(self, pairs: list[tuple[str | None, object]]) -> None:
        self._refuse_members([module for _, module in pairs])
        super()._replace(pairs)

    @property
    def return_composite(self) -> bool:
        """True if :meth:`get_dist` returns a composite of all distributions, False for the last one."""
        if self._return_composite is not None:
            return self._return_composite
        members = list(self)
        count = sum([isinstance(module, ProbabilisticTensorDictModule) for module in members])
        return count > 1 or not is_probabilistic(members[-1])

    def _list_distributions(self) -> list[ProbabilisticTensorDictModule]:
        return list(find_distributions(self))[::-1]

    @property
    def dist_sample_keys(self) -> list[Key]:
        """Keys of the samples of all distributions, the last one first."""
        return [key for module in self._list_distributions() for key in module.dist_sample_keys]

    @property
    def dist_params_keys(self) -> list[Key]:
        """Keys of the parameters of all distributions, the last one first."""
        return [key for module in self._list_distributions() for key in module.dist_params_keys]

    @property
    def log_prob_keys(self) -> list[Key]:
        """Keys of the log-probabilities of all distributions, the last one first."""
        return [key for module in self._list_distributions() for key in module.log_prob_keys]

    @property
    def log_prob_key(self) -> Key:
        """Key of the log-probability.

        Raises:
            AttributeError: the number of log-probability keys is not one.
        """
        keys = self.log_prob_keys
        if len(keys) == 1:
            return keys[0]
        raise AttributeError

    def __getattr__(self, name: str) -> Any:
        # An AttributeError of the property calls __getattr__, which would search the members and hide the message.
        if name == "log_prob_key":
            raise AttributeError(
                f"a {type(self).__name__} has a log_prob_key if it has one log-probability; it has {self.log_prob_keys}: "
                "read log_prob_keys"
            )
        return super().__getattr__(name)

    @property
    def num_samples(self) -> torch.Size:
        """Leading batch dims that a call adds: the ``num_samples`` of all distributions, the last one first."""
        sizes = [module.num_samples or () for module in self._list_distributions()]
        return torch.Size([size for item in sizes for size in item])

    @property
    def default_interaction_type(self) -> InteractionType | None:
        """Default interaction type of the last distribution; :func:`interaction_type` if there is none."""
        for module in self._list_distributions():
            return module.default_interaction_type
        return interaction_type()

    def __getitem__(self, index: int | str | slice) -> Any:
        """Return a member by index or name, or a sequence of the members in a slice.

        A slice is probabilistic if it ends with a distribution, or if ``return_composite`` is True and it has one.
        """
        if not isinstance(index, slice):
            return super().__getitem__(index)
        pairs = self._pairs()[index]
        members = [module for _, module in pairs]
        is_composite = self.return_composite
        kept = members if is_composite else members[-1:]
        if any(map(is_probabilistic, kept)):
            new = self._with(pairs)
            new._return_composite = is_composite
            return new
        provided: Members = {str(name): module for name, module in pairs} if self._is_named else members
        return TensorDictSequential(provided, partial_tolerant=self.partial_tolerant, inplace=self.inplace)

    def _with(self, pairs: list[tuple[str | None, object]]) -> Self:
        new = super()._with(pairs)
        if new._return_composite is False and not is_probabilistic(pairs[-1][1]):
            new._return_composite = None
        return new

    @dispatch(auto_batch_size=False)
    def forward(  # type: ignore[override]
        self,
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None = None,
        _requires_sample: bool | None = None,
        **kwargs: object,
    ) -> TensorCollection:
        """Run the members and return the collection that has their outputs.

        Args:
            tensordict: collection with the inputs.
            tensordict_out: collection that receives the outputs, whatever ``inplace`` is; the input does not change then.
            _requires_sample: False does not draw samples of the last distribution. By default, they are drawn unless
                earlier members write them.
            **kwargs: further arguments of the members that are not distributions.
        """
        run = self._run
        if kwargs or _requires_sample is not None:
            run = functools.partial(self._run, kwargs=kwargs, requires_sample=_requires_sample)
        return self._store_results(tensordict, tensordict_out, run)

    def _run(
        self,
        tensordict: TensorCollection,
        kwargs: dict[str, object] | None = None,
        requires_sample: bool | None = None,
    ) -> TensorCollection:
        """Run the members in order and return the result of the last one."""
        plan = self._plan
        if plan is None:
            plan = self.__dict__["_plan"] = self._make_plan()
        dists, is_written = plan
        if dists and STATE.interaction_type is None:
            STATE.interaction_type = kind = _find_shared_type(dists)  # hot path: without the context manager
            if kind is not None:
                try:
                    return self._run(tensordict, kwargs, requires_sample)
                finally:
                    STATE.interaction_type = None
        if requires_sample is None and is_written:
            requires_sample = False
        members: Any = self._modules["module"]._modules  # type: ignore[union-attr]
        place, end = 0, len(members) - 1
        try:
            for module in members.values():
                if self.partial_tolerant and not has_keys(tensordict, module.in_keys):
                    run_on_members(module, tensordict)
                elif requires_sample is False and place == end and is_probabilistic(module):
                    tensordict = module(tensordict, _requires_sample=False)
                elif kwargs and not isinstance(module, ProbabilisticTensorDictModule):
                    tensordict = module(tensordict, **kwargs)
                else:
                    tensordict = module(tensordict)
                place += 1
        except Exception as error:
            self._locate(error, place)
            raise
        return tensordict

    def _make_plan(self) -> tuple[list[ProbabilisticTensorDictModule], bool]:
        """Return the distributions whose interaction type all members use, and whether members write all samples of the last."""
        *early, last = self
        dists = self._list_typed()
        written = {key for module in early for key in module.out_keys}
        is_written = isinstance(last, ProbabilisticTensorDictModule) and written.issuperset(
            last.dist_sample_keys
        )
        return dists, is_written

    def _list_typed(self) -> list[ProbabilisticTensorDictModule]:
        """List the distributions whose default interaction type applies to all members, if they have the same."""
        dists = self._list_distributions()
        return dists if self.return_composite else dists[:1]

    def _take_members(
        self, container: nn.ModuleList | nn.ModuleDict, in_keys: list[Key], out_keys: list[Key]
    ) -> None:
        super()._take_members(container, in_keys, out_keys)
        self.__dict__.pop("_plan", None)

    def get_dist(
        self, tensordict: TensorCollection, tensordict_out: TensorCollection | None = None, **kwargs: object
    ) -> Distribution:
        """Run the members before the last distribution, and build the distribution.

        Args:
            tensordict: collection with the inputs. Its samples of earlier distributions are used, and missing ones are
                drawn. The outputs of the members are stored in it, unless ``return_composite`` is True.
            tensordict_out: collection that receives the outputs of the members; ``tensordict`` does not change then.
            **kwargs: further arguments of the members that are not distributions.

        Returns:
            The last distribution. If ``return_composite`` is True, a :class:`CompositeDistribution` of all distributions.

        Raises:
            RuntimeError: no member is a distribution.

        >>> from torch.distributions import Normal
        >>> chain = ProbabilisticTensorDictSequential(
        ...     ProbabilisticTensorDictModule(
        ...         {"loc": "x", "scale": "s"}, ["a"], distribution_class=Normal
        ...     ),
        ...     ProbabilisticTensorDictModule(
        ...         {"loc": "a", "scale": "s"}, ["b"], distribution_class=Normal
        ...     ),
        ... )
        >>> data = TensorDict(x=torch.zeros(()), s=torch.ones(()), a=torch.tensor(7.0))
        >>> chain.get_dist(data)["b"].loc
        tensor(7.)
        """
        modules = self._require_distributions()
        with _set_type(_find_shared_type(self._list_typed())):
            if self.return_composite:
                return self._build_composite(modules, tensordict, tensordict_out, kwargs)
            result = self._run_before_last(modules, tensordict, tensordict_out, kwargs)
            return self._build_last(modules[0], result)

    def get_dist_params(
        self, tensordict: TensorCollection, tensordict_out: TensorCollection | None = None, **kwargs: object
    ) -> TensorCollection:
        """Run the members before the last distribution, and return the collection that has its parameters.

        Args:
            tensordict: collection with the inputs; the outputs of the members are stored in it.
            tensordict_out: collection that receives the outputs of the members; ``tensordict`` does not change then.
            **kwargs: further arguments of the members that are not distributions.
        """
        modules = self._require_distributions()
        with _set_type(modules[0].default_interaction_type):
            result = self._run_before_last(modules, tensordict, tensordict_out, kwargs)
        return result if tensordict_out is None else tensordict_out

    def build_dist_from_params(self, tensordict: TensorCollection) -> Distribution:
        """Build the last distribution from its parameters in a collection, without running members.

        Raises:
            RuntimeError: no member is a distribution.
        """
        last = self._require_distributions()[0]
        with _set_type(last.default_interaction_type):
            return self._build_last(last, tensordict)

    def log_prob(
        self,
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None = None,
        *,
        dist: Distribution | None = None,
        **kwargs: object,
    ) -> Any:
        """Return the log-probability of the samples in a collection.

        Each distribution is conditioned on the samples of the earlier ones that the collection has.

        Args:
            tensordict: collection with the inputs and the samples. The outputs of the members are stored in it, unless
                ``return_composite`` is True.
            tensordict_out: collection that receives the outputs of the members; ``tensordict`` does not change then.
            dist: the result of an earlier :meth:`get_dist`; the members are not run then.
            **kwargs: further arguments of the members that are not distributions.

        Returns:
            The log-probability of the last distribution. If ``return_composite`` is True, a TensorDict with one
            log-probability per distribution, at the key where a call stores it; or their sum if they are aggregated.

        Raises:
            MissingKeyError: a sample is missing.
        """
        if dist is None:
            dist = self.get_dist(tensordict, tensordict_out, **kwargs)
        modules = self._list_distributions()
        if not isinstance(dist, CompositeDistribution) or not self.return_composite:
            source = tensordict if tensordict_out is None else tensordict.copy()
            return modules[0].log_prob(source, dist=dist)
        for module in modules:
            module._refuse_other_mode()
        if dist._is_aggregating():
            return dist.log_prob(tensordict)
        keys = {key: name for module in modules for key, name in zip(module._out_keys, module._log_prob_keys)}
        entries = {
            keys.get(key, add_suffix(key, "_log_prob")): value
            for key, value in dist.score(tensordict).items()
        }
        return TensorDict(entries, batch_size=tensordict.batch_size)

    def _dist_sample(
        self,
        dist: Distribution,
        interaction_type: InteractionType | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> object:
        """Return a sample or statistic of the last distribution. Subclasses in other packages call this method."""
        return self._require_distributions()[0]._dist_sample(dist, interaction_type, generator=generator)

    def _require_distributions(self) -> list[ProbabilisticTensorDictModule]:
        """Return the distributions, the last one first. Raise RuntimeError if there are none."""
        modules = self._list_distributions()
        if not modules:
            raise RuntimeError(
                f"no member of this {type(self).__name__} is a ProbabilisticTensorDictModule, so it has no distribution; "
                f"it writes {self.out_keys}"
            )
        return modules

    def _build_last(self, last: ProbabilisticTensorDictModule, tensordict: TensorCollection) -> Distribution:
        """Build the last distribution; add the path of the member to an error."""
        try:
            dist: Distribution = last.get_dist(tensordict)
            return dist
        except Exception as error:
            places = [
                place for place, module in enumerate(self) if last in list(find_distributions([module]))
            ]
            self._locate(error, places[-1])
            raise

    def _run_before_last(
        self,
        modules: list[ProbabilisticTensorDictModule],
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None,
        kwargs: dict[str, object],
    ) -> TensorCollection:
        """Run the members before the last distribution, store their outputs, and return the collection it reads."""
        if tensordict_out is not None or self.inplace in (False, "empty"):
            tensordict = tensordict.copy()
        result = _run_conditioned(self, tensordict, kwargs, [], len(modules))
        self._store_written(modules[0], result, tensordict_out)
        return result

    def _build_composite(
        self,
        modules: list[ProbabilisticTensorDictModule],
        tensordict: TensorCollection,
        tensordict_out: TensorCollection | None,
        kwargs: dict[str, object],
    ) -> CompositeDistribution:
        results: list[tuple[Any, Any]] = []
        last = modules[0]
        result = _run_conditioned(self, tensordict.copy(), kwargs, results, len(modules))
        self._store_written(last, result, tensordict_out)
        results[-1] = (last, self._build_last(last, result))
        dists: dict[Key, Distribution] = {}
        for module, dist in results:
            if module is None:  # partial_tolerant skipped the member
                continue
            if isinstance(dist, CompositeDistribution):
                dists.update(dist)
            elif len(module._out_keys) == 1:
                dists[module._out_keys[0]] = dist
            else:
                raise TypeError(
                    f"{show_module(module)} draws the samples {module._out_keys} together, which a CompositeDistribution "
                    "cannot hold; build the sequence with return_composite=False"
                )
        sizes = [
            size
            for module, dist in results
            if module is not None
            for size in _list_sizes(module, dist, result)
        ]
        shared = share_dims(sizes)
        # The distributions of a collection without batch dims can share those of a nested one.
        params = TensorDict(batch_size=shared) if len(shared) > result.batch_dims else result
        return CompositeDistribution.from_distributions(params, dists, aggregate=results[-1][0]._aggregate)

    def _store_written(
        self,
        last: ProbabilisticTensorDictModule,
        result: TensorCollection,
        tensordict_out: TensorCollection | None,
    ) -> None:
        if tensordict_out is not None:
            present = result.keys(True)
            own = (*last._out_keys, *last._log_prob_keys)
            kept = [key for key in self._all_out_keys if key in present and key not in own]
            store_outputs(tensordict_out, kept, map(result.get, kept))


def _run_conditioned(
    seq: TensorDictSequential,
    tensordict: TensorCollection,
    kwargs: dict[str, object],
    actual: list[tuple[object, object]],
    total: int,
) -> TensorCollection:
    """Run members and record the distribution of each in ``actual``; do not build the last one."""
    for place, module in enumerate(seq):
        if len(actual) == total:
            break
        try:
            if isinstance(module, ProbabilisticTensorDictModule) and len(actual) == total - 1:
                actual.append((module, None))
            elif seq.partial_tolerant and not has_keys(tensordict, module.in_keys):
                run_on_members(module, tensordict)
                actual += [(None, None) for _ in find_distributions([module])]
            elif isinstance(module, ProbabilisticTensorDictModule):
                dist = module.get_dist(tensordict)
                actual.append((module, dist))
                keys = list(dist) if isinstance(dist, CompositeDistribution) else module._out_keys
                if RULES.follows_tensordict or not has_keys(tensordict, keys):
                    tensordict = module._store(tensordict, None, dist)
            elif isinstance(module, TensorDictSequential) and any(find_distributions(module)):
                tensordict = _run_conditioned(module, tensordict, kwargs, actual, total)
            else:
                tensordict = module(tensordict, **kwargs)
        except Exception as error:
            seq._locate(error, place)
            raise
    return tensordict


def _find_shared_type(dists: list[ProbabilisticTensorDictModule]) -> InteractionType | None:
    """Return the default interaction type of distributions; None if they differ."""
    kind = dists[0].default_interaction_type
    for module in dists[1:]:
        if module.default_interaction_type != kind:
            return None
    return kind if type(kind) is InteractionType else InteractionType(kind)  # an assigned one may be a string


def _set_type(kind: InteractionType | None) -> set_interaction_type:
    """Return a block with an interaction type, unless there is one already."""
    return set_interaction_type(STATE.interaction_type or kind)


def _list_sizes(
    module: ProbabilisticTensorDictModule, dist: Distribution, tensordict: TensorCollection
) -> list[torch.Size]:
    """Return the batch shape of a distribution, and the batch sizes of the collections that hold its parameters."""
    sizes = [torch.Size(getattr(dist, "batch_shape", ()))]
    if not isinstance(dist, CompositeDistribution):
        levels = [tensordict if type(key) is str else tensordict.get(key[:-1]) for key in module.in_keys]
        sizes += [level.batch_size for level in levels if level is not None]
    return sizes


def is_probabilistic(module: object) -> bool:
    """Return True if a module is a distribution."""
    return isinstance(module, (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential))


def find_distributions(members: Iterable[object]) -> Iterator[ProbabilisticTensorDictModule]:
    """Yield the distributions among members and in nested sequences, in order."""
    for module in members:
        if isinstance(module, ProbabilisticTensorDictModule):
            yield module
        elif isinstance(module, TensorDictSequential):
            yield from find_distributions(module)
