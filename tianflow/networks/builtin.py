"""Built-in networks: `Mlp`, `NatureCnn` and `ImpalaResnet`, with an optional LSTM after the
torso.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tianflow.config.model import NetworkSettings
from tianflow.config.networks import (
    image_size,
    is_image,
    resnet_channels,
    torso_leaves,
    units,
)
from tianflow.core.payloads import EnvironmentSpec
from tianflow.networks.arrays import ArrayMlp
from tianflow.networks.base import Network, Output, Tree
from tianflow.networks.parts import (
    ImageTorso,
    MlpTorso,
    ResettingLstm,
    Vector,
    impala_trunk,
    linear,
    nature_trunk,
)
from tianflow.ops.distributions import distribution_for

Torso = MlpTorso | ImageTorso


class TorsoNetwork(Network):
    """Torso, optional LSTM, policy head and value head.

    With ``value_torso`` the value has its own torso. With an LSTM there is only one torso, because
    there is one recurrent state. The policy head has initial gain 0.01, so the first policy is
    nearly uniform; the value head has gain 1. The log standard deviations of a Gaussian policy do
    not depend on the observation; their initial value is ``kwargs["log_std"]`` (0).
    """

    def __init__(
        self,
        settings: NetworkSettings,
        spec: EnvironmentSpec,
        torso: Torso,
        value_torso: Torso | None = None,
    ) -> None:
        super().__init__()
        if settings.lstm and value_torso is not None:
            raise ValueError("with an LSTM, policy and value must share the torso")
        distribution = distribution_for(spec.action)
        self.torso, self.value_torso = torso, value_torso
        self.further = Vector(torso_leaves(settings, spec.observation)[1])
        inputs = torso.size + self.further.size
        self.lstm = ResettingLstm(inputs, settings.lstm) if settings.lstm else None
        self.policy_head = linear(settings.lstm or torso.size, distribution.noise_size, 0.01)
        self.value_head = linear(settings.lstm or torso.size, 1, 1.0)
        self.log_std = None
        if spec.action.kind == "box":
            self.log_std = nn.Parameter(
                torch.full((distribution.noise_size,), float(settings.kwargs.get("log_std", 0.0)))
            )

    @staticmethod
    def state_spec(settings: NetworkSettings) -> dict[str, tuple[int, ...]]:
        return {"h": (settings.lstm,), "c": (settings.lstm,)} if settings.lstm else {}

    def forward(self, observation: Tree, state: Tree, start: Tensor) -> Output:
        steps, columns = start.shape
        flat = {name: leaf.flatten(0, 1) for name, leaf in observation.items()}
        features: Tensor = self.torso(flat)
        states: Tree = {}
        if self.lstm is not None:
            inputs = self.further.beside(features, flat)
            hidden, states = self.lstm(inputs.view(steps, columns, -1), state, start)
            features = hidden.flatten(0, 1)
        value_features = features if self.value_torso is None else self.value_torso(flat)
        value: Tensor = self.value_head(value_features)
        return Output(
            self._policy(features).view(steps, columns, -1), value.view(steps, columns), states
        )

    def act(self, observation: Tree, state: Tree) -> tuple[Tensor, Tree]:
        features: Tensor = self.torso.forward(observation)
        if self.lstm is not None:
            inputs = self.further.beside(features, observation)
            features, state = self.lstm.step(inputs, state)
        return self._policy(features), state

    def _policy(self, features: Tensor) -> Tensor:
        logits = functional.linear(features, self.policy_head.weight, self.policy_head.bias)
        return (
            logits
            if self.log_std is None
            else torch.cat([logits, self.log_std.expand_as(logits)], -1)
        )


class Mlp(TorsoNetwork):
    """Fully connected layers ``hidden``. Policy and value are separate unless ``share_torso`` or
    ``lstm``.
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        shared = settings.share_torso or settings.lstm > 0
        leaves, _ = torso_leaves(settings, spec.observation)
        torsos = [
            MlpTorso(leaves, settings.hidden, settings.activation)
            for _ in range(1 if shared else 2)
        ]
        super().__init__(settings, spec, *torsos)
        self._activation = settings.activation

    def on_arrays(self) -> ArrayMlp | None:
        """`act` on arrays; None with an LSTM, if the observation is not one float32 vector, or in a
        derived class that computes its policy in another way.
        """
        torso = self.torso
        if any(
            getattr(type(self), name) is not getattr(Mlp, name)
            for name in ("forward", "act", "_policy")
        ):
            return None
        if self.lstm is not None or not isinstance(torso, MlpTorso) or torso.vector.plain is None:
            return None
        layers = [
            (layer.weight, layer.bias)
            for layer in (*torso.layers, self.policy_head)
            if isinstance(layer, nn.Linear)
        ]
        return ArrayMlp(
            leaf=torso.vector.plain,
            layers=layers,
            activation=self._activation,
            log_std=self.log_std,
        )


class NatureCnn(TorsoNetwork):
    """Three convolutions per uint8 image and one layer of ``kwargs["units"]`` (512), shared by both
    heads.
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        super().__init__(
            settings,
            spec,
            _image_torso(settings, spec, nature_trunk, units(settings, "nature_cnn")),
        )


class ImpalaResnet(TorsoNetwork):
    """Residual convolutions ``kwargs["channels"]`` (16, 32, 32), one layer of ``kwargs["units"]``
    (256).
    """

    def __init__(self, settings: NetworkSettings, spec: EnvironmentSpec) -> None:
        sizes = resnet_channels(settings)
        torso = _image_torso(
            settings,
            spec,
            lambda channels: impala_trunk(channels, sizes),
            units(settings, "impala_resnet"),
        )
        super().__init__(settings, spec, torso)


def _image_torso(
    settings: NetworkSettings,
    spec: EnvironmentSpec,
    make_trunk: Callable[[int], nn.Module],
    units: int,
) -> ImageTorso:
    leaves, _ = torso_leaves(settings, spec.observation)
    trunks = [make_trunk(image_size(leaf.shape)[0]) for leaf in leaves if is_image(leaf)]
    return ImageTorso(leaves, trunks, units)
