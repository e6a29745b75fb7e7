"""Both networks as tensors: the same as `planner.methods.dreamshard.Policy`, and what only training needs.

Known limits: nothing that inference has; the network that predicts a whole placement is not saved, as only rewards
come from it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from rowwise.planner.methods.dreamshard import COSTS, LARGEST, LAYERS, NONE, SUMS, WIDTH, WITH, WORSE, Layer

COST_LAYERS = ("table", "loads", "heads", "costs", "whole", "overall")
POLICY_LAYERS = ("kind", "kinds", "seen", "state", "join", "logit", "straight")
OVERALL = {"whole": (SUMS + 1, WIDTH), "overall": (WIDTH, 1)}  # layers of the prediction of a whole placement
SHARPNESS, WORST = 4.0, 25.0  # of the straight path at first: for costs with the table, for those of the worst rank


class Networks(nn.Module):
    """The layers of both policy networks by name. `dtype` is that of the parameters."""

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
        """Vectors of tables that the cost network adds up."""
        return self._linear("loads", self._relu("table", normal_TF)).clamp(max=LARGEST).exp()

    def kinds(self, normal_TF: Tensor) -> Tensor:
        """Vectors of tables that the policy adds up."""
        return self._linear("kinds", self._relu("kind", normal_TF))

    def costs(self, loads_NH: Tensor) -> Tensor:
        """In units (N, 3), of ranks with these sums."""
        mean_N1 = loads_NH.mean(-1, keepdim=True)
        some_N1 = mean_N1.clamp(min=NONE)
        hidden = self._relu("heads", torch.cat([loads_NH / some_N1, some_N1.log()], dim=-1))
        out_NC = (hidden.unflatten(-1, (COSTS, WIDTH)) * self.weight["costs"]).sum(-1) + self.bias["costs"]
        return mean_N1 * softplus(out_NC)

    def overall(self, loads_EUH: Tensor, cost_EUC: Tensor) -> Tensor:
        """Of whole placements (E): the worst work and the worst links, corrected by the largest sums of any rank."""
        largest_EH = loads_EUH.amax(1)
        mean_E1 = largest_EH.mean(-1, keepdim=True).clamp(min=NONE)
        hidden = self._relu("whole", torch.cat([largest_EH / mean_E1, mean_E1.log()], dim=-1))
        worst_E = (cost_EUC[..., 0] + cost_EUC[..., 2]).amax(1) + cost_EUC[..., 1].amax(1)
        return worst_E * self._linear("overall", hidden)[..., 0].clamp(-0.5, 0.5).exp()

    def logits(self, seen_NS: Tensor, here_NH: Tensor, one_NH: Tensor) -> Tensor:
        """How much the policy wants a table on a rank."""
        state_NH = self._linear("state", self._relu("seen", seen_NS))
        joined = torch.cat([state_NH, here_NH, one_NH], dim=-1).relu()
        out_N1 = self._linear("logit", self._relu("join", joined)) + self._linear("straight", seen_NS)
        return out_N1[..., 0]

    def parameters_of(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        return [part[name] for name in names for part in (self.weight, self.bias)]

    def layer(self, name: str) -> Layer:
        """As it is saved: rounded to five digits, which is more than training knows."""
        weight = [tuple(float(f"{x:.5g}") for x in row) for row in self.weight[name].tolist()]
        return Layer(weight=tuple(weight), bias=tuple(float(f"{x:.5g}") for x in self.bias[name].tolist()))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight[name] + self.bias[name]

    def _relu(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).relu()
