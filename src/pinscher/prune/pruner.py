"""Pruner: the only object that writes weights. It works in the step hooks of any torch optimiser.

One step of iterative pruning: before the optimiser's step the criterion sees (weight_t, grad_t), after it
(weight_t+1, grad_t). When the schedule says so, all weights are ranked together and θ_t+1 <- θ_t+1 * M. `t` counts
completed steps: one that a GradScaler skips does not count.

The pruner decides when, the criterion which weights (criteria.py), and `weights` applies the masks (weights.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.prune import adapters, optimizers, sharding
from pinscher.prune.calibration import Batches, missing
from pinscher.prune.config import STATE_DTYPES, PruningConfig
from pinscher.prune.masking import Ranks
from pinscher.prune.patterns import UNSTRUCTURED
from pinscher.prune.ranking import Projection, Ranking
from pinscher.prune.sharding import local
from pinscher.prune.sites import Site, find_sites
from pinscher.prune.summary import Count, table

VERSION = 1  # of the state dict
NEARLY_DENSE = 0.99  # a denser model counts as dense: a few weights are zero by chance


class Pruner:
    """Prunes a model while an optimiser trains it.

    Args:
        model: the model; its weights are changed in place. Learned masks are registered here, so build the optimiser
            afterwards, from `param_groups()`.
        config: what to prune, how far and how.
        ranks: the processes that hold shards of the weights. By default those of FSDP2's mesh, or none where every
            process holds all weights (DDP). Shard the model first; only learned masks are made before and sharded
            with it.
        calibration: batches of model inputs for wanda and sparsegpt, or a function that returns them when needed.
        sites: the model's prunable matrices, if `find_sites` has found them already.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PruningConfig,
        ranks: Ranks | None = None,
        calibration: Batches | None = None,
        sites: Sequence[Site] | None = None,
    ) -> None:
        self.model, self.config, self.calibration = model, config, calibration
        sharding.reshard(model)
        if sites is None:
            sites = find_sites(model, config.target_modules, config.exclude_modules)
        for site in sites:
            if not site.owner.is_contiguous():
                site.owner.data = site.owner.data.contiguous()
        self.criterion = config.make_criterion()
        adapted = adapters.are_there(sites, self.criterion)
        layout = config.make_layout(sites, model)
        self.sites = sites if layout is None else layout.sites
        kind = adapters.AdaptedWeights if adapted else self.criterion.weights
        self.weights = kind(model, self.sites, self.criterion)
        self.sharded = sharding.is_sharded(self.sites[0].owner)  # whether each process holds a part of every weight
        if self.sharded:
            self.weights.refuse_shards(made_before=False)
        self.schedule = config.make_schedule()
        again = self.criterion.lasting and config.regrow and not self.schedule.once  # whether scores give masks again
        self.ranking = Ranking(
            self.sites,
            self.criterion,
            store=self.weights.stores_masks or not again or config.track_revived or layout is not None,
            regrow=config.regrow,
            ranks=sharding.ranks_of(self.sites) if ranks is None else ranks,
            layout=layout,
        )
        self._refuse_cut_units()
        density = self.kept / self.total
        start = max(density, self.schedule.final) if density < NEARLY_DENSE else 1.0
        self.schedule = config.make_schedule(initial_density=start)
        self.t = 0
        self.finished = False
        self._observed = 0  # steps seen in this interval
        self._late = False  # an interval was to end at a step without finite gradients: it ends at the next one
        self._overdue = False  # likewise for a ranking
        self._ranked_now, self._skipping, self._usable = False, False, True
        self._probe: Any = None
        self._step: FrameType | None = None  # the optimiser's step that is running
        self._hooks: list[Any] = []
        for site in self.sites:
            self.criterion.prepare(site, STATE_DTYPES[config.state_dtype])
        self.weights.install(sparse=self.schedule.initial < 1.0)

    @property
    def total(self) -> int:
        """How many weights are prunable (d)."""
        return self.ranking.total

    @property
    def kept(self) -> int:
        """How many of them the last ranking kept."""
        return self.ranking.kept

    @property
    def target(self) -> int:
        """How many of them are kept in the end."""
        return self.ranking.count(self.schedule.final)

    @property
    def projection(self) -> Projection | None:
        """How far learned masks were off when they were last set to the exact density."""
        return self.ranking.projection

    @property
    def ranks(self) -> Ranks:
        """The processes that hold the weights together."""
        return self.ranking.ranks

    @property
    def adapted(self) -> bool:
        """Whether the weights are frozen below adapters."""
        return self.weights.adapted

    # ------------------------------------------------------------ the hooks

    def attach(self, optimizer: Any) -> Pruner:
        """Hooks the pruner into an optimiser's steps; nothing else has to be called in the training loop."""
        if self._hooks:
            raise RuntimeError("this pruner is already attached; call detach() first")
        if self.finished:
            raise RuntimeError("this pruner is finished; make a new one to prune further")
        self.refuse_sparser()
        optimizer = optimizers.unwrap(optimizer)
        self._join()
        optimizers.refuse_early_updates(self.sites)
        self.weights.refuse_optimizer(optimizer)
        if self.criterion.needs_calibration and self.calibration is None:
            raise missing(self.criterion)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def detach(self) -> None:
        """Removes the hooks; the model and the pruner's state stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def refuse_sparser(self) -> None:
        """Raises an error for a model with more zeros than asked for: some would have to grow back."""
        if self.t == 0 and self.config.initial_sparsity is None and self.kept < self.target:
            raise ValueError(
                f"the model is already {1 - self.kept / self.total:.1%} sparse, more than the target "
                f"{self.config.sparsity:.1%}. Ask for more, or set initial_sparsity=0 to let weights grow back."
            )

    def _join(self) -> None:
        """Finds the processes of a model that was sharded after its learned masks were made."""
        sharding.reshard(self.model)
        if sharding.is_sharded(self.sites[0].owner) and not self.sharded:
            self.weights.refuse_shards(made_before=True)
            self.sharded, self.ranking.ranks = True, sharding.ranks_of(self.sites)
            self._refuse_cut_units()

    def _refuse_cut_units(self) -> None:
        if self.ranking.layout is not None and self.ranks.size > 1:
            self.ranking.layout.refuse_cut(self.config.pattern)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A subclass's step that calls its parent's runs the hooks twice: only the outer step counts.
        if optimizers.on_stack(self._step):
            return
        self._step = sys._getframe(1)
        optimizers.refuse_closure(args, kwargs)
        with torch.no_grad():
            self._prepare_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if sys._getframe(1) is self._step:
            self._step = None
            with torch.no_grad():
                self._complete_step()

    def _prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._skipping = optimizers.skips(optimizer)
        if self._skipping:
            return
        optimizers.read_step(optimizer, self.sites)
        self._usable = not self.criterion.needs_grad or optimizers.finite(self.weights.gradients(), self.ranks)
        if not self._usable:
            warnings.warn(f"step {self.t + 1}: non-finite gradients are left out of the scores", stacklevel=2)
            for parameter in self.weights.parameters():
                parameter.grad = None  # the optimiser skips it
        if self.criterion.moment == "before":
            self._look(self.t + 1)
        elif self.criterion.needs_grad:
            self._probe = optimizers.probe_of(self.sites)
        self.criterion.add_penalty(self.ranking, self.schedule, self.t)
        if self.criterion.measures_first and self.t < self.schedule.settled_at:
            optimizers.drop_gradients(optimizer)

    def _complete_step(self) -> None:
        if not self._skipping:
            self.t += 1
            if self.criterion.moment == "after":
                optimizers.reread_scale(self.sites, self._probe)
                self._look(self.t)
            self.criterion.steer(self.ranking, self.schedule, self.t)
            if self._ranked_now or self._holding():
                self.weights.apply(self.ranking)
            self._ranked_now = False
        self.weights.end_step()

    def _look(self, t: int) -> None:
        """Shows every site to the criterion and ranks the weights if that is due after step t."""
        ends = self._late or t % self.schedule.interval == 0
        due = self._overdue or self.schedule.due(t)
        self._late, self._overdue = ends and not self._usable, due and not self._usable
        if not self._usable:
            return
        self._observed += 1
        for site in self.sites:
            self.criterion.observe(site, t, closing=self._observed if ends else 0)
        if ends:
            self._observed = 0
        if due:
            self._rank(self.schedule.density(t))
            self._ranked_now = True

    def _rank(self, density: float, early: bool = False) -> None:
        """Chooses the weights to keep."""
        for site in self.sites:
            self.criterion.ready(site)
        if early:
            self.ranking.refuse_unmeasured(self.config.method, self.schedule.interval)
        self.criterion.choose_masks(self.ranking, density, self.model, self.calibration, self.config.scope)

    def _holding(self) -> bool:
        """Whether pruned weights are set to zero again after this step."""
        hold = self.criterion.hold or self.config.hold
        wanted = hold == "always" or (hold == "cooldown" and self.schedule.settled(self.t))
        return self.ranking.exists and (wanted or self.t >= self.schedule.total)

    # ------------------------------------------------------------ before and after training

    def param_groups(self, gates_only: bool = False) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser: the model's own parameters, then those of learned masks.

        The masks' group has its own learning rate and no weight decay. Methods without learned masks have a single
        group, so `AdamW(pruner.param_groups(), lr=...)` works for every method.
        """
        known = {id(p) for p in self.weights.parameters()}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        own: list[dict[str, Any]] = [] if gates_only else [{"params": rest}]
        return own + self.weights.param_groups()

    def finish(self, early: bool = False) -> nn.Module:
        """Ends pruning: leaves plain weights with exact zeros, removes the hooks, returns the model.

        Raises:
            RuntimeError: if the schedule has not reached its end; `early` prunes to the target at once instead.
        """
        if self.finished:
            return self.model
        behind = self.schedule.final < 1.0 and self.kept != self.target
        if (behind or self.t < self.schedule.total) and not early:
            raise RuntimeError(
                f"the target sparsity is not reached: {self.t} of {self.schedule.total} steps are done, {self.kept:,} "
                f"weights are kept, {self.target:,} are wanted. Continue training, or "
                "call finish(early=True) to prune to the target now."
            )
        self._join()
        with torch.no_grad():
            if behind:
                self._rank(self.schedule.final, early=True)
            if self.schedule.final < 1.0:
                self.weights.apply(self.ranking)
            self.model = self.weights.finish()
        self.detach()
        self.finished = True
        return self.model

    def model_state_dict(self) -> dict[str, Any]:
        """The state dict of an ordinary model, whatever the method, fit for a model file."""
        self._join()
        return self.weights.model_state_dict()

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain values and tensors (safe to store without pickle).

        Of a sharded model tensors are DTensors, to be stored with `pinscher.train.sharded`; every rank must call it.
        """
        self._join()
        return {
            "version": VERSION,
            "config": self.config.to_dict(),
            "t": self.t,
            "finished": self.finished,
            "initial_density": self.schedule.initial,
            "observed": self._observed,
            "late": self._late,
            "overdue": self._overdue,
            "projection": None if self.projection is None else [self.projection.density, self.projection.changed],
            "ranking": self.ranking.state_dict(),
            "sites": self.weights.tensors(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`. The caller restores the model's plain weights.

        Raises:
            ValueError: if the state is of another version, method or model. Nothing is changed then.
        """
        mine = self.state_dict()
        self._refuse_other_state(state, mine)
        self.schedule = self.config.make_schedule(initial_density=state["initial_density"])
        self.t, self._observed = state["t"], state["observed"]
        self._late, self._overdue = state["late"], state["overdue"]
        self.ranking.projection = None if state["projection"] is None else Projection(*state["projection"])
        for name, tensors in mine["sites"].items():
            for key, tensor in tensors.items():
                local(tensor).copy_(local(state["sites"][name][key]))
        self.ranking.load_state_dict(state["ranking"])

    def _refuse_other_state(self, state: dict[str, Any], mine: dict[str, Any]) -> None:
        """Raises an error for a saved state that does not fit `mine`, the state now; warns of other settings."""
        if state.get("version") != VERSION:
            raise ValueError(f"pruner state of version {state.get('version')}; this pinscher reads version {VERSION}")
        if state["finished"] or self.finished:
            raise ValueError("a finished pruner cannot be resumed: its model is an ordinary one, load that instead")
        theirs = {"pattern": UNSTRUCTURED, "scope": None} | state["config"]  # not in older checkpoints
        for name in ("method", "options", "regrow", "state_dtype", "pattern", "scope"):
            if theirs[name] != mine["config"][name]:
                raise ValueError(
                    f"the checkpoint was made with {name}={theirs[name]!r}, this run has "
                    f"{mine['config'][name]!r}: resume with the same"
                )
        if set(state["sites"]) != set(mine["sites"]):
            odd = min(set(state["sites"]) ^ set(mine["sites"]))
            raise ValueError(f"the checkpoint prunes other matrices than this model has, for example {odd}")
        for place, tensors in mine["sites"].items():
            for name, tensor in tensors.items():
                saved = state["sites"][place].get(name)
                if saved is None or saved.shape != tensor.shape or local(saved).shape != local(tensor).shape:
                    raise ValueError(f"the checkpoint's {name} of {place} is missing or has another shape")
        sizes = {site.name: site.numel for site in self.sites}
        for place, mask in state["ranking"]["pruned"].items():
            if mask.numel() != sizes.get(place):
                raise ValueError(f"the checkpoint's mask of {place} has another shape")
        changed = [n for n, value in mine["config"].items() if theirs.get(n) != value]
        if changed:
            warnings.warn(f"resuming with other settings than the checkpoint's: {', '.join(changed)}", stacklevel=4)

    def state_bytes(self) -> int:
        """Memory of the pruner's own tensors, learned masks included."""
        own = [*self.weights.own_tensors(), *self.ranking.pruned.values()]
        return sum(t.numel() * t.element_size() for t in own)

    # ------------------------------------------------------------ for logs and users

    def mask(self, name: str) -> Tensor:
        """The last mask of a site, shaped like its weight, True where kept; a DTensor if that is one."""
        self._join()
        for i, site in enumerate(self.sites):
            if site.name == name:
                return sharding.like(site.owner, self.ranking.mask(i)).view(site.shape)
        raise ValueError(f"no site is named {name!r}; the first is {self.sites[0].name!r}")

    def stats(self) -> dict[str, Any]:
        """The figures of this step, for a log."""
        cut = self.ranking.threshold
        return {
            "step": self.t,
            "density": self.kept / self.total,
            "density_target": self.schedule.density(self.t),
            "threshold": None if cut is None else cut.value,
            "revived": self.ranking.revived,
            "returned": self.ranking.returned,
            "maskings": self.ranking.maskings,
        }

    def summary(self) -> str:
        """Prints, and returns, a table of the zeros per layer and kind of matrix, and of the whole model."""
        counts = [Count(site.block, site.kind, site.zeros(), site.numel) for site in self.sites]
        zeros = sum(c.zeros for c in counts)
        title = (
            f"{self.config.method}: step {self.t} of {self.schedule.total}, sparsity {zeros / self.total:.2%} "
            f"(target {self.config.sparsity:.2%}), {self.total - zeros:,} of {self.total:,} weights left "
            f"in {len(self.sites)} matrices"
        )
        text = table(counts, title)
        print(text)
        return text
