"""Modules that read and write collections, for td-core.

>>> import torch
>>> from td_core import TensorDict
>>> from td_nn import TensorDictModule, TensorDictSequential
>>> model = TensorDictSequential(
...     TensorDictModule(torch.nn.Linear(3, 4), ["obs"], ["hidden"]),
...     TensorDictModule(torch.nn.Linear(4, 2), ["hidden"], ["action"]),
... )
>>> model(TensorDict({"obs": torch.ones(5, 3)}, batch_size=[5]))["action"].shape
torch.Size([5, 2])
>>> print(model)
TensorDictSequential: obs -> hidden, action
member  module                    reads   writes
[0]     TensorDictModule(Linear)  obs     hidden
[1]     TensorDictModule(Linear)  hidden  action
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# td_core must be imported before this package's modules: its last statement loads the plugin of this package.
import td_core as _td_core
from td_core.spi import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ._aggregate import composite_lp_aggregate, set_composite_lp_aggregate
    from ._composite import CompositeDistribution
    from ._cuda_graph import CudaGraphModule
    from ._data_flow import FlowReport
    from ._delta import Delta
    from ._dispatch import dispatch
    from ._ensemble import EnsembleModule
    from ._extractors import AddStateIndependentNormalScale, NormalParamExtractor
    from ._interaction import InteractionType, interaction_type, set_interaction_type
    from ._mappings import add_custom_mapping, mappings
    from ._mappings import biased_softplus as biased_softplus
    from ._mappings import expln as expln
    from ._mappings import inv_softplus as inv_softplus
    from ._module import TensorDictModule, TensorDictModuleWrapper
    from ._module_base import TensorDictModuleBase
    from ._one_hot import OneHotCategorical, rand_one_hot
    from ._prob_sequence import ProbabilisticTensorDictSequential
    from ._probabilistic import ProbabilisticTensorDictModule
    from ._sequence import TensorDictSequential
    from ._switches import set_skip_existing, skip_existing
    from ._tensorclass_module import TensorClassModuleBase, TensorClassModuleWrapper
    from ._truncated_normal import TruncatedNormal, TruncatedStandardNormal
    from ._wrap import WrapModule, as_tensordict_module
    from .module_errors import MissingKeyError, ModuleKeysError, OutputError, SelectionError

__version__ = _td_core.__version__

__all__ = [
    "AddStateIndependentNormalScale", "CompositeDistribution", "CudaGraphModule", "Delta", "EnsembleModule",
    "FlowReport", "InteractionType", "MissingKeyError", "ModuleKeysError", "NormalParamExtractor",
    "OneHotCategorical", "OutputError", "ProbabilisticTensorDictModule", "ProbabilisticTensorDictSequential",
    "SelectionError", "TensorClassModuleBase", "TensorClassModuleWrapper", "TensorDictModule",
    "TensorDictModuleBase", "TensorDictModuleWrapper", "TensorDictSequential", "TruncatedNormal",
    "TruncatedStandardNormal", "WrapModule", "__version__", "add_custom_mapping", "as_tensordict_module",
    "composite_lp_aggregate", "dispatch", "interaction_type", "mappings", "rand_one_hot",
    "set_composite_lp_aggregate", "set_interaction_type", "set_skip_existing", "skip_existing",
]  # fmt: skip

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "._cuda_graph": ("CudaGraphModule",),
        "._aggregate": ("composite_lp_aggregate", "set_composite_lp_aggregate"),
        "._composite": ("CompositeDistribution",),
        "._delta": ("Delta",),
        "._extractors": ("AddStateIndependentNormalScale", "NormalParamExtractor"),
        "._mappings": ("add_custom_mapping", "biased_softplus", "expln", "inv_softplus", "mappings"),
        "._one_hot": ("OneHotCategorical", "rand_one_hot"),
        "._prob_sequence": ("ProbabilisticTensorDictSequential",),
        "._probabilistic": ("ProbabilisticTensorDictModule",),
        "._truncated_normal": ("TruncatedNormal", "TruncatedStandardNormal"),
        "._data_flow": ("FlowReport",),
        "._dispatch": ("dispatch",),
        "._ensemble": ("EnsembleModule",),
        "._interaction": ("InteractionType", "interaction_type", "set_interaction_type"),
        "._module": ("TensorDictModule", "TensorDictModuleWrapper"),
        "._module_base": ("TensorDictModuleBase",),
        "._sequence": ("TensorDictSequential",),
        "._switches": ("set_skip_existing", "skip_existing"),
        "._tensorclass_module": ("TensorClassModuleBase", "TensorClassModuleWrapper"),
        "._wrap": ("WrapModule", "as_tensordict_module"),
        ".module_errors": ("MissingKeyError", "ModuleKeysError", "OutputError", "SelectionError"),
    },
    hidden=("biased_softplus", "expln", "inv_softplus"),  # for programs of tensordict alone
)
