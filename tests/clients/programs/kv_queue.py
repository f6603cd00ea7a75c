"""Rows that TransferQueue keeps in other processes: put by key, with ragged fields and text later; read and cleared."""

from __future__ import annotations

import ray
import torch
import transfer_queue as tq
from report import report
from tensordict import TensorDict

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="queue")
tq.init()
first = TensorDict({"ids": torch.tensor([[1, 2, 3]]), "mask": torch.ones(1, 3)}, batch_size=[1])
tq.kv_put(key="0_0", partition_id="train", fields=first, tag={"status": "running"})
rest = TensorDict({"ids": torch.arange(12).view(4, 3), "mask": torch.zeros(4, 3)}, batch_size=[4])
keys = ["1_0", "1_1", "1_2", "2_0"]
tq.kv_batch_put(keys=keys, partition_id="train", fields=rest, tags=[{"status": "running"}] * 4)
answers = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(4)], layout=torch.jagged)
more = TensorDict({"answer": answers, "text": ["short", "long"]}, batch_size=[2])
tq.kv_batch_put(keys=keys[1:3], partition_id="train", fields=more, tags=[{"status": "done"}] * 2)

listed = tq.kv_list()["train"]
report("tags", sorted((key, tag["status"]) for key, tag in listed.items()))
both = tq.kv_batch_get(keys=["0_0", *keys], partition_id="train", select_fields=["ids", "mask"])
report("rows", list(both.batch_size), *both["ids"].unbind(), sum(row.sum() for row in both["mask"].unbind()))
found = tq.kv_batch_get(keys=keys[1:3], partition_id="train")
report("fields", sorted(found.keys()), list(found["answer"].unbind()), list(found["text"]))
tq.kv_clear(keys=["0_0", "1_0"], partition_id="train")
report("left", sorted(tq.kv_list(partition_id="train")["train"]))
tq.close()
ray.shutdown()
