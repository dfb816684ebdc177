"""Value head of an action policy."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

ACTIVATIONS = {"gelu": nn.GELU, "tanh": nn.Tanh}


class ValueHead(nn.Module):
    """MLP from a hidden state to values; its names and initialization are those of RLinf's value heads."""

    def __init__(self, input_size: int, hidden_sizes: tuple[int, ...], output_size: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        layers: list[nn.Module] = []
        for size in hidden_sizes:
            layers += [nn.Linear(input_size, size), ACTIVATIONS[activation]()]
            input_size = size
        self.mlp = nn.Sequential(*layers, nn.Linear(input_size, output_size, bias=False))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [B, V] of hidden states [B, H]."""
        values: Tensor = self.mlp(hidden)
        return values

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        # torch has no gain of GELU, which is close to ReLU
        nonlinearity: Literal["tanh", "relu"] = "tanh" if self.activation == "tanh" else "relu"
        *hidden_layers, last = [layer for layer in self.mlp if isinstance(layer, nn.Linear)]
        for layer in hidden_layers:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity=nonlinearity)
            nn.init.zeros_(layer.bias)
        nn.init.normal_(last.weight, std=0.02)
