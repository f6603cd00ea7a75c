"""Names in pickles of opened saves, importable from here in every release.

>>> from td_safetensors import safetensors_pickles, save
>>> import pickle
>>> _ = save(TensorDict({"a": torch.ones(2)}), "data.safetensors")
>>> b"td_safetensors.safetensors_pickles" in pickle.dumps(TensorDict.open("data.safetensors")["a"])
True
"""

from ._open import FileSource, rebuild_mapped

__all__ = ["FileSource", "rebuild_mapped"]
