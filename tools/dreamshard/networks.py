"""The cost network and the policy as torch modules: `planner.methods.dreamshard.Policy` with gradients.

Names and shapes of layers are the planner's. The network that predicts the cost of a whole placement gives rewards
only, so it is not saved.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rowwise.planning.planner.methods.dreamshard import COSTS, EPSILON, LARGEST, LAYERS, SUMS, WIDTH, WITH, WORSE, Layer

COST_LAYERS = ("table", "loads", "heads", "costs", "whole", "overall")
POLICY_LAYERS = ("kind", "kinds", "seen", "state", "join", "logit", "straight")
OVERALL = {"whole": (SUMS + 1, WIDTH), "overall": (WIDTH, 1)}  # layers of the prediction of a whole placement
SHARPNESS, WORST = 4.0, 25.0  # initial weights of the straight path: costs with the table, costs of the worst rank


class Networks(nn.Module):
    """All layers of both networks, by name."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = nn.ParameterDict(), nn.ParameterDict()
        for name, (wide, out) in (LAYERS | OVERALL).items():
            scale = (2.0 / (WIDTH if name == "costs" else wide)) ** 0.5
            self.weight[name] = nn.Parameter(torch.randn(wide, out, generator=generator) * scale)
            self.bias[name] = nn.Parameter(torch.zeros(COSTS if name == "costs" else out))
        with torch.no_grad():
            for name in ("loads", "overall", "logit", "straight"):
                self.weight[name] *= 0.1 if name == "loads" else 0.0
            self.weight["logit"] += torch.randn(WIDTH, 1, generator=generator) * 0.01
            self.weight["straight"][WITH] = -SHARPNESS
            self.weight["straight"][WORSE] = -WORST

    def loads(self, normal_TF: Tensor) -> Tensor:
        return self._linear("loads", self._relu("table", normal_TF)).clamp(max=LARGEST).exp()

    def kinds(self, normal_TF: Tensor) -> Tensor:
        return self._linear("kinds", self._relu("kind", normal_TF))

    def costs(self, loads_NH: Tensor) -> Tensor:
        """Costs (N, 3) of ranks with these sums of table vectors, in units of `unit_s`."""
        mean_N1 = loads_NH.mean(-1, keepdim=True)
        some_N1 = mean_N1.clamp(min=EPSILON)
        hidden = self._relu("heads", torch.cat([loads_NH / some_N1, some_N1.log()], dim=-1))
        out_NC = (hidden.unflatten(-1, (COSTS, WIDTH)) * self.weight["costs"]).sum(-1) + self.bias["costs"]
        return mean_N1 * softplus(out_NC)

    def overall(self, loads_EUH: Tensor, cost_EUC: Tensor) -> Tensor:
        """Cost (E) of whole placements: largest operators plus largest links of any rank, times a learned factor."""
        largest_EH = loads_EUH.amax(1)
        mean_E1 = largest_EH.mean(-1, keepdim=True).clamp(min=EPSILON)
        hidden = self._relu("whole", torch.cat([largest_EH / mean_E1, mean_E1.log()], dim=-1))
        worst_E = (cost_EUC[..., 0] + cost_EUC[..., 2]).amax(1) + cost_EUC[..., 1].amax(1)
        return worst_E * self._linear("overall", hidden)[..., 0].clamp(-0.5, 0.5).exp()

    def logits(self, inputs_NS: Tensor, here_NH: Tensor, one_NH: Tensor) -> Tensor:
        state_NH = self._linear("state", self._relu("seen", inputs_NS))
        joined = torch.cat([state_NH, here_NH, one_NH], dim=-1).relu()
        out_N1 = self._linear("logit", self._relu("join", joined)) + self._linear("straight", inputs_NS)
        return out_N1[..., 0]

    def parameters_of(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        return [part[name] for name in names for part in (self.weight, self.bias)]

    def layer(self, name: str) -> Layer:
        """The layer as it is saved, rounded to five digits."""
        weight = [tuple(float(f"{x:.5g}") for x in row) for row in self.weight[name].tolist()]
        return Layer(weight=tuple(weight), bias=tuple(float(f"{x:.5g}") for x in self.bias[name].tolist()))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight[name] + self.bias[name]

    def _relu(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).relu()
