"""How masks are applied to a model's weights.

`Weights` writes zeros into the weights themselves. `gates.LearnedWeights` and `adapters.AdaptedWeights` put a gate
above each weight, so that the forward pass sees the masked weight while the one below keeps its values. The pruner
works with any of them, without distinction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from pinscher.prune.sharding import like
from pinscher.prune.sites import Site

if TYPE_CHECKING:
    from pinscher.prune.criteria import Criterion
    from pinscher.prune.ranking import Ranking


class Weights:
    """The prunable weights of a model, masked in place.

    Args:
        model: the model.
        sites: its prunable matrices.
        criterion: the method.
    """

    adapted: ClassVar[bool] = False  # whether the weights are frozen below adapters
    stores_masks: ClassVar[bool] = False  # whether a ranking has to store its masks

    criterion: Criterion

    def __init__(self, model: nn.Module, sites: Sequence[Site], criterion: Criterion) -> None:
        self.model, self.sites, self.criterion = model, sites, criterion

    # ------------------------------------------------------------ refusals

    def refuse_shards(self, made_before: bool) -> None:
        """Raises an error for sharded weights that this method cannot prune.

        Args:
            made_before: whether the pruner was made before the model was sharded.

        Raises:
            ValueError: with what to do instead.
        """
        if self.criterion.unshardable is not None:
            raise ValueError(self.criterion.unshardable)
        if made_before:
            raise ValueError(
                f"{self.sites[0].name} was sharded after the Pruner was made, but the Pruner keeps scores of whole "
                "matrices. Call fully_shard first, then make the Pruner, then the optimiser."
            )

    def refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises an error for an optimiser that does not train what the scores need.

        Raises:
            ValueError: with what to do instead.
        """
        if not self.criterion.needs_grad:
            return
        inside = trained_by(optimizer)
        missing = [site.name for site in self.sites if id(site.owner) not in inside or not site.owner.requires_grad]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self.sites)} prunable matrices are frozen or not in this optimiser, for "
                f"example {missing[0]}. Train them, or leave them out with exclude_modules."
            )

    # ------------------------------------------------------------ from the first step to the last

    def install(self, sparse: bool) -> None:
        """Prepares the model for masks. `sparse`: whether existing zeros count as pruned."""

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of learned masks."""
        return []

    def param_groups(self) -> list[dict[str, Any]]:
        """The same as parameter groups for an optimiser."""
        return []

    def gradients(self) -> Iterator[Tensor | None]:
        """The gradients that scores are computed from."""
        return (site.grad for site in self.sites)

    def apply(self, ranking: Ranking) -> None:
        """Makes the weights that the last ranking pruned zero."""
        ranking.apply()

    def end_step(self) -> None:
        """Drops what was collected for this step."""

    def finish(self) -> nn.Module:
        """Leaves plain weights with exact zeros, and returns the model they are in."""
        return self.model

    # ------------------------------------------------------------ state

    def model_state_dict(self) -> dict[str, Any]:
        """The state dict of an ordinary model, as if pruning ended now."""
        return self.model.state_dict()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint stores of each site. The memory is shared; tensors of a sharded site are DTensors."""
        return {site.name: _state_of(site) for site in self.sites}

    def own_tensors(self) -> list[Tensor]:
        """The tensors that exist only for pruning: this rank's parts."""
        return [tensor for site in self.sites for tensor in site.state.values()]


def trained_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of all parameters of an optimiser."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _state_of(site: Site) -> dict[str, Tensor]:
    return {
        name: like(site.owner, tensor) if tensor.is_floating_point() else tensor for name, tensor in site.state.items()
    }
