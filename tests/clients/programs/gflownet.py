"""Trajectory balance with torchgfn: logits and masks of graphs as collections, containers saved and loaded."""

from __future__ import annotations

import tempfile

import torch
from gfn.containers import Trajectories
from gfn.estimators import DiscreteGraphPolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.gym import HyperGrid
from gfn.gym.graph_building import GraphBuildingOnEdges
from gfn.states import GraphStates
from gfn.utils.modules import GraphActionGNN
from report import report

NODES = 3


def count_edges(states: GraphStates) -> torch.Tensor:
    """Return the reward of each graph: one, and one for each edge."""
    return torch.tensor([1.0 + graph.edge_index.shape[1] for graph in states.tensor.to_data_list()])


def make_policy(*, is_backward: bool) -> DiscreteGraphPolicyEstimator:
    """Return a policy that adds an edge, or removes one."""
    network = GraphActionGNN(
        num_node_classes=NODES,  # each node is a class of its own
        num_edge_classes=1,
        directed=True,
        embedding_dim=8,
        is_backward=is_backward,
    )
    return DiscreteGraphPolicyEstimator(network, is_backward=is_backward)


torch.manual_seed(0)
env = GraphBuildingOnEdges(NODES, count_edges, directed=True, device="cpu")
flow = TBGFlowNet(make_policy(is_backward=False), make_policy(is_backward=True))
optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
for step in range(4):
    trajectories = flow.sample_trajectories(env, n=6, save_logprobs=True)
    loss = flow.loss(env, trajectories, recalculate_all_logprobs=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report(f"loss {step}", loss, trajectories.actions.tensor.sum())

states = trajectories.terminating_states
for name, collection in (
    ("masks", states.forward_masks),
    ("backward masks", states.backward_masks),
    ("logits", flow.pf(states)),
):
    report(name, collection.batch_size, *(item for pair in sorted(collection.items()) for item in pair))

grid = HyperGrid(ndim=2, height=8)
steps = [torch.zeros(2, 2).long(), torch.tensor([[1, 0], [0, 1]]), torch.full((2, 2), -1)]
paths = Trajectories(
    grid,
    states=grid.States(torch.stack(steps)),
    actions=grid.Actions(torch.tensor([[[0], [1]], [[2], [2]]])),
    terminating_idx=torch.tensor([2, 2]),
    log_rewards=torch.tensor([0.5, 1.5]),
)
with tempfile.NamedTemporaryFile() as file:
    paths.save(file.name)
    loaded = Trajectories.load(grid, file.name)
saved = loaded.to_tensordict()
report("trajectories", saved.batch_size, *(item for pair in sorted(saved.items()) for item in pair))
