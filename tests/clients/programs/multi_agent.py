"""Multi-agent networks of TorchRL, with layers that infer the size of their input under vmap; QMIX and VDN mixers."""

from __future__ import annotations

import torch
from report import report
from tensordict import TensorDict
from torchrl.modules import MultiAgentConvNet, MultiAgentMLP, QMixer, VDNMixer

torch.manual_seed(0)

for share in (False, True):
    for centralized in (False, True):
        for size in (None, 5):
            net = MultiAgentMLP(
                n_agent_inputs=size,
                n_agent_outputs=2,
                n_agents=3,
                centralized=centralized,
                share_params=share,
                depth=2,
                num_cells=8,
            )
            inputs = torch.randn(4, 3, 5)
            outputs = net(inputs)
            outputs.sum().backward()
            name = f"mlp, share={share}, centralized={centralized}, inputs={size}"
            report(name, outputs.shape, [(*p.shape, p.grad is not None) for p in net.parameters()])
            # The initial values of inferred layers are not those of tensordict, which draws them for all members at once.
            report(name, torch.equal(net(inputs), outputs), outputs if size or share else None)

net = MultiAgentConvNet(n_agents=2, centralized=False, share_params=False, kernel_sizes=3, num_cells=[4])
report("convolution", net(torch.randn(3, 2, 3, 8, 8)).shape, [tuple(p.shape) for p in net.parameters()])

net = MultiAgentMLP(
    n_agent_inputs=5, n_agent_outputs=1, n_agents=3, centralized=False, share_params=False, depth=1
)
data = TensorDict({"agents": {"obs": torch.randn(4, 3, 5)}}, [4])
values = net(data["agents", "obs"])
report("vdn", VDNMixer(n_agents=3, device="cpu")(values))
report(
    "qmix", QMixer(state_shape=(6,), mixing_embed_dim=8, n_agents=3, device="cpu")(values, torch.randn(4, 6))
)
