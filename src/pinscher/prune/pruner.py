"""Pruner: the only object that writes weights. It lives in the step hooks of any torch optimiser.

One step of iterative pruning: before the optimiser's step the criterion sees (weight_t, grad_t), after it
(weight_t+1, grad_t); when the schedule says so all weights are ranked together and θ_t+1 <- θ_t+1 * M. `t` counts
completed steps: one that a GradScaler skips never happened.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.prune import adapters, controller, hosts, resuming, sharding
from pinscher.prune.calibrated import Batches, Calibrated, require
from pinscher.prune.config import STATE_DTYPES, PruningConfig
from pinscher.prune.gates import Gated, gate_of, is_gated, plain_state_dict
from pinscher.prune.masking import Ranks
from pinscher.prune.patterns import Layout
from pinscher.prune.ranking import Ranking
from pinscher.prune.resuming import VERSION
from pinscher.prune.sites import find_sites
from pinscher.prune.summary import Count, table
from pinscher.prune.walk import prune_blocks_

NEARLY_DENSE = 0.99  # a checkpoint with fewer zeros than this was never pruned: a few weights are zero by chance


class Pruner:
    """Prunes a model while an optimiser trains it.

    Args:
        model: the model; its weights are changed in place. Learned masks are registered here, before the optimiser
            exists: give it `param_groups()`.
        config: what to prune, how far and how.
        ranks: the processes that hold shards of the weights. Left out they are found: those of FSDP2's mesh, or none
            where every process holds all weights (DDP). Shard the model before; learned masks alone are made first
            and sharded with it.
        calibration: batches of model inputs for wanda and sparsegpt, or a function that gives them when they are due.
    """

    def __init__(
        self, model: nn.Module, config: PruningConfig, ranks: Ranks | None = None, calibration: Batches | None = None
    ) -> None:
        self.model, self.config, self.calibration = model, config, calibration
        sharding.reshard(model)
        self.sites = find_sites(model, config.target_modules, config.exclude_modules)
        for site in self.sites:
            if not site.owner.is_contiguous():
                site.owner.data = site.owner.data.contiguous()
        self.criterion = config.make_criterion()
        self.sharded = sharding.is_sharded(self.sites[0].owner)  # whether each process holds a part of every weight
        if self.sharded:
            hosts.refuse_shards(self.sites, self.criterion, made_before=False)
        self.ranks = sharding.ranks_of(self.sites) if ranks is None else ranks
        self.schedule = config.make_schedule()
        self.adapted = adapters.are_there(self.sites, self.criterion)
        self.others = adapters.others(model, self.sites) if self.adapted else []  # further matrices with adapters
        layout = config.make_layout(self.sites, model)
        if layout is not None:
            self.sites = layout.sites
            self._check_cuts(layout)
        gated = isinstance(self.criterion, Gated) or self.adapted
        again = self.criterion.lasting and config.regrow and not self.schedule.once
        store = gated or not again or config.track_revived or layout is not None
        self.ranking = Ranking(
            self.sites, self.criterion, store=store, regrow=config.regrow, ranks=self.ranks, layout=layout
        )
        density = self.ranking.kept / self.total
        start = max(density, self.schedule.final) if density < NEARLY_DENSE else 1.0
        self.schedule = config.make_schedule(initial_density=start)
        self.t = 0
        self.finished = False
        self.projection: controller.Projection | None = None  # how far a controlled method was off at the end
        self._observed = 0  # steps seen in this interval
        self._late = False  # an interval ended at a step without usable gradients: ends at the next good one
        self._overdue = False  # likewise for a ranking
        self._ranked_now, self._skipping, self._usable = False, False, True
        self._probe: Any = None
        self._step: FrameType | None = None  # the optimiser's step that is under way
        self._hooks: list[Any] = []
        for site in self.sites:
            self.criterion.prepare(site, STATE_DTYPES[config.state_dtype])
        if isinstance(self.criterion, Gated):
            controller.open_gates(self.criterion, self)
        elif self.adapted:
            adapters.open_(self.sites, self.others)

    @property
    def total(self) -> int:
        """How many weights are prunable (d)."""
        return self.ranking.total

    @property
    def kept(self) -> int:
        """How many of them the last masking kept."""
        return self.ranking.kept

    @property
    def target(self) -> int:
        """How many of them are kept in the end."""
        return self.ranking.count(self.schedule.final)

    # ------------------------------------------------------------ the hooks

    def attach(self, optimizer: Any) -> Pruner:
        """Hooks the pruner into an optimiser's steps; nothing else has to be called in the training loop."""
        if self._hooks:
            raise RuntimeError("this pruner is attached already; call detach() first")
        if self.finished:
            raise RuntimeError("this pruner is finished; make a new one to prune further")
        self.refuse_sparser()
        optimizer = hosts.unwrap(optimizer)
        self._join()
        hosts.check(optimizer, self.sites, self.criterion)
        if isinstance(self.criterion, Calibrated):
            require(self.criterion, self.calibration)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def _join(self) -> None:
        """Finds out who holds the weights of a model that was sharded after its learned masks were made."""
        sharding.reshard(self.model)
        if sharding.is_sharded(self.sites[0].owner) and not self.sharded:
            hosts.refuse_shards(self.sites, self.criterion, made_before=True)
            self.sharded, self.ranks = True, sharding.ranks_of(self.sites)
            self.ranking.ranks = self.ranks
            self._check_cuts(self.ranking.layout)

    def _check_cuts(self, layout: Layout | None) -> None:
        if layout is not None and self.ranks.size > 1:
            layout.refuse_cut(self.config.pattern)

    def refuse_sparser(self) -> None:
        """Refuses a model with more zeros than asked for: some would have to grow back from nothing."""
        if self.t == 0 and self.config.initial_sparsity is None and self.kept < self.target:
            raise ValueError(
                f"the model is already {1 - self.kept / self.total:.1%} sparse, more than the target "
                f"{self.config.sparsity:.1%}. Ask for more, or set initial_sparsity=0 to let weights grow back."
            )

    def detach(self) -> None:
        """Removes the hooks; the model and the pruner's state stay as they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A subclass's step that calls its parent's runs the hooks twice: only the outer step counts.
        if hosts.on_stack(self._step):
            return
        self._step = sys._getframe(1)
        hosts.refuse_closure(args, kwargs)
        with torch.no_grad():
            self._prepare_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if sys._getframe(1) is self._step:
            self._step = None
            with torch.no_grad():
                self._complete_step()

    def _prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._skipping = hosts.skips(optimizer)
        if self._skipping:
            return
        hosts.read_step(optimizer, self.sites)
        self._usable = not self.criterion.needs_grad or hosts.finite(self._gradients(), self.ranks)
        if not self._usable:
            warnings.warn(f"step {self.t + 1}: non-finite gradients; they do not enter the scores", stacklevel=2)
            for parameter in self._gate_parameters():
                parameter.grad = None  # the optimiser passes over it
        if self.criterion.moment == "before":
            self._look(self.t + 1)
        elif self.criterion.needs_grad:
            self._probe = hosts.probe_of(self.sites)
        if isinstance(self.criterion, Gated) and self.criterion.adds_penalty:
            controller.add_penalty(self.criterion, self)
        if self.criterion.measures_first and self.t < self.schedule.settled_at:
            hosts.drop_gradients(optimizer)

    def _complete_step(self) -> None:
        if self._skipping:
            adapters.forget(self.sites)
            return
        self.t += 1
        if isinstance(self.criterion, Gated):
            controller.steer(self.criterion, self, self.t)
            return
        if self.criterion.moment == "after":
            hosts.reread_scale(self.sites, self._probe)
            self._look(self.t)
        if self._ranked_now or self._holding():
            self._apply()
        self._ranked_now = False
        adapters.forget(self.sites)

    def _apply(self) -> None:
        """Makes pruned weights zero: in their place, or above frozen weights in what the forward pass sees of them."""
        if self.adapted:
            adapters.close_(self.sites, self.ranking)
        else:
            self.ranking.apply()

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
        """Chooses the weights to keep; a method may change them to make up for those that go."""
        if isinstance(self.criterion, Calibrated):
            data, scope = self.calibration, self.config.scope
            self.ranking.adopt(prune_blocks_(self.model, self.ranking, self.criterion, density, data, scope))
            return
        for site in self.sites:
            self.criterion.ready(site)
        if early:
            self.ranking.refuse_unmeasured(self.config.method, self.schedule.interval)
        self.ranking.rank(density)
        for site in self.sites if self.ranking.pruned else ():
            self.criterion.compensate(site, self.ranking.pruned[site.name])

    def _gate_parameters(self) -> list[nn.Parameter]:
        """The parameters of learned masks; none for other methods."""
        if not isinstance(self.criterion, Gated) or self.finished:
            return []
        return [p for site in self.sites for p in gate_of(site).parameters() if p.requires_grad]

    def _gradients(self) -> Iterator[Tensor | None]:
        """The gradients that scores come from."""
        if isinstance(self.criterion, Gated):
            return (parameter.grad for parameter in self._gate_parameters())
        return (site.grad for site in self.sites)

    def _holding(self) -> bool:
        """Whether pruned weights are set to zero after this step, whatever the optimiser did to them."""
        hold = self.criterion.hold or self.config.hold
        wanted = hold == "always" or (hold == "cooldown" and self.schedule.settled(self.t))
        return self.ranking.exists and (wanted or self.t >= self.schedule.total)

    # ------------------------------------------------------------ learned masks

    def param_groups(self, gates_only: bool = False) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser: the model's own parameters, then those of learned masks.

        The masks' group carries its own learning rate and no weight decay. Methods without learned masks give a single
        group, so `AdamW(pruner.param_groups(), lr=...)` is right for every method.
        """
        masks = self._gate_parameters()
        known = {id(p) for p in masks}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        groups: list[dict[str, Any]] = [] if gates_only else [{"params": rest}]
        if isinstance(self.criterion, Gated):
            groups.append({"params": masks, "lr": self.criterion.score_lr, "weight_decay": 0.0})
        return groups

    def finish(self, early: bool = False) -> nn.Module:
        """Ends pruning: leaves plain weights with exact zeros, removes the hooks, returns the model.

        Raises:
            RuntimeError: if the schedule has not been run to its end, unless `early` asks for the target at once.
        """
        if self.finished:
            return self.model
        behind = self.schedule.final < 1.0 and self.kept != self.target
        if (behind or self.t < self.schedule.total) and not early:
            raise RuntimeError(
                f"the target sparsity is not reached: {self.t} of {self.schedule.total} steps are done, {self.kept:,} "
                f"weights are kept, {self.target:,} are wanted. Train on, or call "
                "finish(early=True) to prune to the target now."
            )
        self._join()
        with torch.no_grad():
            if isinstance(self.criterion, Gated):
                if behind:
                    controller.project(self.criterion, self, self.schedule.final)
                controller.bake(self.sites)
            elif self.schedule.final < 1.0:
                if behind:
                    self._rank(self.schedule.final, early=True)
                self._apply()
            if self.adapted:
                controller.bake([*self.sites, *self.others])
                self.model = adapters.unload(self.model, [*self.sites, *self.others])
        self.detach()
        self.finished = True
        return self.model

    def model_state_dict(self) -> dict[str, Any]:
        """The model's state dict as an ordinary model's, whatever the method: what may be written to a model file."""
        self._join()
        if not is_gated(self.sites[0]):  # baked, or never there; those of sharded weights stay
            return self.model.state_dict()
        plain = adapters.plain_state_dict if self.adapted else plain_state_dict
        return plain(self.model, [*self.sites, *self.others])

    @property
    def _gates_are_open(self) -> bool:
        return not self.finished and is_gated(self.sites[0])

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain values and tensors (safe to store without pickle).

        Of a sharded model tensors are DTensors, to be stored with `pinscher.sharded`; every rank must call it.
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
            "sites": resuming.tensors_of([*self.sites, *self.others], self._gates_are_open),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; the model's plain weights are restored by whoever saved them.

        Raises:
            ValueError: if the state is of another version, method or model. Nothing is changed then.
        """
        mine = self.state_dict()
        resuming.check(state, mine, self.sites, self.finished)
        self.schedule = self.config.make_schedule(initial_density=state["initial_density"])
        self.t, self._observed = state["t"], state["observed"]
        self._late, self._overdue = state["late"], state["overdue"]
        self.projection = None if state["projection"] is None else controller.Projection(*state["projection"])
        resuming.restore_(mine["sites"], state["sites"])
        self.ranking.load_state_dict(state["ranking"])

    def state_bytes(self) -> int:
        """Memory of the pruner's own tensors, learned masks included."""
        own = [t for site in self.sites for t in site.state.values()] + list(self.ranking.pruned.values())
        if self._gates_are_open:
            own += [sharding.local(t) for site in self.sites for t in gate_of(site).state_dict().values()]
        return sum(t.numel() * t.element_size() for t in own)

    # ------------------------------------------------------------ what people and logs see

    def mask(self, name: str) -> Tensor:
        """The last mask of a site, shaped like its weight, True where kept; a DTensor if that is one."""
        self._join()
        for i, site in enumerate(self.sites):
            if site.name == name:
                return sharding.like(site.owner, self.ranking.mask(i)).view(site.shape)
        raise ValueError(f"no site is named {name!r}; the first is {self.sites[0].name!r}")

    def stats(self) -> dict[str, Any]:
        """This step's figures for a log."""
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
