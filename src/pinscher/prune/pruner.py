"""Pruner: the only object that writes weights. It lives in the step hooks of any torch optimiser.

One step of iterative pruning: before the optimiser's step the criterion sees (weight_t, grad_t), after it
(weight_t+1, grad_t); when the schedule says so all weights are ranked together and θ_t+1 <- θ_t+1 * M. `t` counts completed
steps: one that a GradScaler skips never happened.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune import controller, hosts
from pinscher.prune.config import STATE_DTYPES, PruningConfig
from pinscher.prune.gates import Gated, gate_of
from pinscher.prune.masking import Reduce, Scores, Threshold, parts, threshold
from pinscher.prune.sites import Site, find_sites
from pinscher.prune.summary import Count, table

VERSION = 1


class Pruner:
    """Prunes a model while an optimiser trains it.

    Args:
        model: the model; its weights are changed in place. Learned masks are registered here, before the optimiser
            exists: give it `param_groups()`.
        config: what to prune, how far and how.
        reduce: sums a small integer tensor over the ranks that hold shards; None where every rank holds all weights.
    """

    def __init__(self, model: nn.Module, config: PruningConfig, reduce: Reduce | None = None) -> None:
        self.model, self.config, self.reduce = model, config, reduce
        self.sites = find_sites(model, config.target_modules, config.exclude_modules)
        self.criterion = config.make_criterion()
        self.total = sum(site.numel for site in self.sites)
        zeros = sum(site.numel - int(torch.count_nonzero(site.weight)) for site in self.sites)
        self.schedule = config.make_schedule(initial_density=1.0 - zeros / self.total)
        if self.schedule.initial < self.schedule.final:
            raise ValueError(
                f"the model is already {1 - self.schedule.initial:.1%} sparse, more than the target "
                f"{config.sparsity:.1%}. Ask for more, or set initial_sparsity=0 to let weights grow back."
            )
        self.t = 0
        self.finished = False
        self.threshold: Threshold | None = None  # of the last global ranking
        self.kept = self.total - zeros  # by the last masking
        self.revived = 0  # weights that the last masking brought back
        self.projection: controller.Projection | None = None  # what the last step did to a controlled method
        self._observed = 0  # steps seen in this interval
        self._overdue = False  # a masking was due at a step without usable gradients
        self._skipping = False
        self._pruned: dict[str, Tensor] = {}  # stored masks, flat, True where pruned
        self._hooks: list[Any] = []
        for site in self.sites:
            if not site.owner.is_contiguous():
                site.owner.data = site.owner.data.contiguous()
            self.criterion.prepare(site, STATE_DTYPES[config.state_dtype])
        if isinstance(self.criterion, Gated):
            self._open_gates(self.criterion)
        elif not config.regrow:
            self._pruned = {site.name: site.weight == 0 for site in self.sites}

    # ------------------------------------------------------------ the hooks

    def attach(self, optimizer: Any) -> Pruner:
        """Hooks the pruner into an optimiser's steps; nothing else has to be called in the training loop."""
        if self._hooks:
            raise RuntimeError("this pruner is attached already; call detach() first")
        optimizer = hosts.unwrap(optimizer)
        hosts.check(optimizer, self.sites, self.criterion)
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

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hosts.refuse_closure(args, kwargs)
        self._skipping = hosts.skips(optimizer)
        if self._skipping:
            return
        hosts.read_step(optimizer, self.sites)
        usable = not self.criterion.needs_grad or hosts.finite(self.sites, self.reduce)
        if not usable:
            warnings.warn(f"step {self.t + 1}: non-finite gradients; they do not enter the scores", stacklevel=2)
        self._usable = usable
        if self.criterion.moment == "before":
            self._look(self.t + 1)
        if isinstance(self.criterion, Gated) and self.criterion.adds_penalty:
            self._add_penalty(self.criterion)
        if self.criterion.calibration and self.t < self.schedule.settled_at:
            hosts.drop_gradients(optimizer)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skipping:
            return
        self.t += 1
        if self.criterion.moment == "after":
            self._look(self.t)
        if isinstance(self.criterion, Gated):
            controller.steer(self.criterion, self.sites, self.schedule, self.t, self)
        elif self._ranked_now or self._holding(self.t):
            self._apply()
        self._ranked_now = False

    _usable = True
    _ranked_now = False

    def _look(self, t: int) -> None:
        """Shows every site to the criterion and ranks the weights if that is due after step t."""
        closing = 0
        if self._usable:
            self._observed += 1
        if t % self.schedule.interval == 0:
            closing, self._observed = self._observed, 0
        if self._usable:
            for site in self.sites:
                self.criterion.observe(site, t, closing)
        if self.schedule.due(t) or self._overdue:
            # A score that only exists at this very step needs this very step's gradient: wait for a good one.
            self._overdue = not self._usable and not self.criterion.lasting
            if not self._overdue:
                self.rank(self.schedule.density(t))

    def _holding(self, t: int) -> bool:
        if self.threshold is None and not self._pruned:
            return False
        hold = self.criterion.hold or self.config.hold
        return hold == "always" or (hold == "cooldown" and self.schedule.settled(t))

    # ------------------------------------------------------------ ranking and masking

    @property
    def stores_masks(self) -> bool:
        """Whether masks are kept as tensors. Smoothed scores give the mask again at any time, for no memory."""
        again = self.criterion.lasting and self.config.regrow and not self.schedule.once
        return not again or self.config.track_revived

    def scores(self, site: Site) -> Scores:
        """The scores the site's weights are ranked by, with what may not come back at the very bottom."""
        scores = self.criterion.scores(site)
        if self.config.regrow or site.name not in self._pruned:
            return scores
        combine = scores.combine or (lambda values: values)
        return Scores(
            *scores.tensors,
            self._pruned[site.name],
            combine=lambda *pieces: combine(*pieces[:-1]).masked_fill(pieces[-1], -torch.inf),
        )

    def rank(self, density: float) -> None:
        """Ranks all weights and remembers which of them stay, exactly floor(density * d + 0.5) of them."""
        before = dict(self._pruned)
        keep = math.floor(density * self.total + 0.5)
        if self.criterion.scope == "global":
            self.threshold = threshold([self.scores(site) for site in self.sites], keep, self.reduce)
        if self.stores_masks or isinstance(self.criterion, Gated):
            self._pruned = {site.name: self._drops_of(i, density) for i, site in enumerate(self.sites)}
            self.kept = self.total - sum(int(p.sum()) for p in self._pruned.values())
            self.revived = sum(int((b & ~self._pruned[name]).sum()) for name, b in before.items())
        else:
            self.kept = keep
        if self.kept != keep:
            raise RuntimeError(f"internal error: {self.kept} weights kept instead of {keep}")
        self._ranked_now = True

    def _drops_of(self, index: int, density: float) -> Tensor:
        """The freshly ranked mask of one site, flat, True where pruned."""
        site = self.sites[index]
        scores = self.scores(site)
        cut, place = self.threshold, index
        if self.criterion.scope == "matrix":
            seen = sum(s.numel for s in self.sites[:index])
            # Rounding the running total, not each matrix, keeps the sum exact.
            keep = math.floor(density * (seen + site.numel) + 0.5) - math.floor(density * seen + 0.5)
            cut, place = threshold([scores], keep), 0
        assert cut is not None
        pruned = torch.empty(scores.numel, dtype=torch.bool)
        for at, drop in cut.drops(scores, place):
            pruned[at] = drop
        return pruned

    def drops(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """(flat slice, True where pruned) of one site by the last masking, part by part."""
        site = self.sites[index]
        if site.name in self._pruned:
            pruned = self._pruned[site.name]
            yield from ((at, pruned[at]) for at in parts(pruned.numel()))
        elif self.threshold is not None:
            yield from self.threshold.drops(self.scores(site), index)

    def _apply(self) -> None:
        """Sets pruned weights to exact zeros."""
        zeros = 0
        for i, site in enumerate(self.sites):
            weight = site.weight
            for at, drop in self.drops(i):
                weight[at].masked_fill_(drop, 0.0)
                if self._ranked_now:
                    zeros += int(torch.count_nonzero(drop))
        if self._ranked_now and self.reduce is None and self.total - zeros != self.kept:
            raise RuntimeError(f"internal error: {self.total - zeros} weights kept instead of {self.kept}")

    def mask(self, name: str) -> Tensor:
        """The last mask of a site, shaped like its weight, True where kept."""
        index = [site.name for site in self.sites].index(name)
        site = self.sites[index]
        kept = torch.ones(site.weight.numel(), dtype=torch.bool)
        for at, drop in self.drops(index):
            kept[at] = ~drop
        return kept.view(site.shape)

    # ------------------------------------------------------------ learned masks

    def param_groups(self, gates_only: bool = False) -> list[dict[str, Any]]:
        """Parameter groups for the optimiser: the model's own parameters, then those of learned masks.

        The masks' groups carry their own learning rate and no weight decay. Methods without learned masks give a single
        group, so `AdamW(pruner.param_groups(), lr=...)` is right for every method.
        """
        masks = [p for site in self.sites if isinstance(self.criterion, Gated) for p in gate_of(site).parameters()]
        known = {id(p) for p in masks}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        groups: list[dict[str, Any]] = [] if gates_only else [{"params": rest}]
        if isinstance(self.criterion, Gated):
            groups.append({"params": masks, "lr": self.criterion.score_lr, "weight_decay": 0.0})
        return groups

    def _open_gates(self, criterion: Gated) -> None:
        if criterion.freezes:
            hosts.freeze_backbone(self.model, self.sites)
        for site in self.sites:
            weight = site.owner
            gate = criterion.make_gate(weight.detach()).to(weight.device)
            if self.schedule.initial < 1.0:
                criterion.close(gate, weight.detach() == 0)
            for module in [site.module, *site.shared_with]:
                parametrize.register_parametrization(module, site.parameter, gate)
            gate.train(site.module.training)

    def _add_penalty(self, criterion: Gated) -> None:
        """Adds the penalty's gradient, decoupled like weight decay: independent of clipping, accumulation and AMP."""
        asked = 1.0 - self.schedule.density(self.t)
        strength = asked / max(1.0 - self.schedule.final, 1e-12)
        for site in self.sites:
            criterion.add_penalty(site, strength * site.grad_scale, self.total)

    def finish(self, early: bool = False) -> nn.Module:
        """Ends pruning: bakes learned masks into plain weights, removes the hooks, returns the model.

        Raises:
            RuntimeError: if the schedule has not been run to its end, unless `early` asks for the target at once.
        """
        if self.finished:
            return self.model
        behind = self.t < self.schedule.total or self._overdue
        if behind and not early:
            raise RuntimeError(
                f"only {self.t} of {self.schedule.total} steps are done, so the target sparsity is not reached. "
                "Train on, or call finish(early=True) to prune to the target now."
            )
        with torch.no_grad():
            if isinstance(self.criterion, Gated):
                if behind:
                    controller.project(self.criterion, self.sites, self.schedule.final, self)
                self._bake()
            elif behind:
                self.rank(self.schedule.final)
                self._apply()
                self._ranked_now = False
        self.detach()
        self.finished = True
        return self.model

    def _bake(self) -> None:
        for site in self.sites:
            gate, owner = gate_of(site), site.owner
            baked = gate.baked(owner.detach()).masked_fill(~gate.mask, 0.0)
            for module in [site.module, *site.shared_with]:
                parametrize.remove_parametrizations(module, site.parameter, leave_parametrized=False)
            site.owner.data.copy_(baked)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain values and tensors (safe to store without pickle)."""
        cut = self.threshold
        sites: dict[str, dict[str, Tensor]] = {}
        for site in self.sites:
            sites[site.name] = dict(site.state)
            if site.name in self._pruned:
                sites[site.name]["pruned"] = self._pruned[site.name]
            if isinstance(self.criterion, Gated) and not self.finished:
                sites[site.name]["weight"] = site.owner.detach()
                gate = gate_of(site).state_dict()
                sites[site.name].update({f"gate.{name}": tensor for name, tensor in gate.items()})
        return {
            "version": VERSION,
            "config": self.config.to_dict(),
            "t": self.t,
            "finished": self.finished,
            "initial_density": self.schedule.initial,
            "threshold": None if cut is None else {"value": cut.value, "quotas": cut.quotas and list(cut.quotas)},
            "kept": self.kept,
            "revived": self.revived,
            "observed": self._observed,
            "overdue": self._overdue,
            "sites": sites,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; the model's plain weights are restored by whoever saved them.

        Raises:
            ValueError: if the state is of another version, method or model. Nothing is changed then.
        """
        mine = self.state_dict()
        self._check_state(state, mine)
        self.schedule = self.config.make_schedule(initial_density=state["initial_density"])
        cut = state["threshold"]
        self.threshold = None if cut is None else Threshold(cut["value"], cut["quotas"] and tuple(cut["quotas"]))
        self.t, self.kept, self.revived = state["t"], state["kept"], state["revived"]
        self._observed, self._overdue = state["observed"], state["overdue"]
        self._pruned = {}
        for site in self.sites:
            for name, tensor in state["sites"][site.name].items():
                if name == "pruned":
                    self._pruned[site.name] = tensor.clone()
                else:
                    mine["sites"][site.name][name].copy_(tensor)

    def _check_state(self, state: dict[str, Any], mine: dict[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ValueError(f"pruner state of version {state.get('version')}; this pinscher reads version {VERSION}")
        if state["finished"] != self.finished:
            raise ValueError("the saved pruner was finished; its model is an ordinary one: load that instead")
        for name in ("method", "options", "regrow", "state_dtype"):
            if state["config"][name] != mine["config"][name]:
                raise ValueError(
                    f"the checkpoint was made with {name}={state['config'][name]!r}, this run has "
                    f"{mine['config'][name]!r}: resume with the same"
                )
        if set(state["sites"]) != set(mine["sites"]):
            odd = sorted(set(state["sites"]) ^ set(mine["sites"]))
            raise ValueError(f"the checkpoint prunes other matrices than this model has, for one {odd[0]}")
        for site, tensors in mine["sites"].items():
            for name, tensor in tensors.items():
                saved = state["sites"][site].get(name)
                if name != "pruned" and (saved is None or saved.shape != tensor.shape):
                    raise ValueError(f"the checkpoint's {name} of {site} is missing or of another shape")
        if state["config"] != mine["config"]:
            changed = [n for n, value in mine["config"].items() if state["config"].get(n) != value]
            warnings.warn(f"resuming with other settings than the checkpoint's: {', '.join(changed)}", stacklevel=3)

    def state_bytes(self) -> int:
        """Memory of the pruner's own tensors, learned masks included."""
        own = [t for site in self.sites for t in site.state.values()] + list(self._pruned.values())
        if isinstance(self.criterion, Gated) and not self.finished:
            own += [t for site in self.sites for t in gate_of(site).state_dict().values()]
        return sum(t.numel() * t.element_size() for t in own)

    # ------------------------------------------------------------ what people and logs see

    def stats(self) -> dict[str, Any]:
        """This step's figures for a log."""
        return {
            "step": self.t,
            "density": self.kept / self.total,
            "density_target": self.schedule.density(self.t),
            "threshold": None if self.threshold is None else self.threshold.value,
            "revived": self.revived,
        }

    def summary(self) -> str:
        """Prints, and returns, a table of the zeros per layer and kind of matrix, and of the whole model."""
        counts = []
        for site in self.sites:
            with torch.no_grad():
                zeros = site.numel - int(torch.count_nonzero(site.effective))
            counts.append(Count(site.block, site.kind, zeros, site.numel))
        zeros = sum(c.zeros for c in counts)
        title = (
            f"{self.config.method}: step {self.t} of {self.schedule.total}, sparsity {zeros / self.total:.2%} "
            f"(target {self.config.sparsity:.2%}), {self.total - zeros:,} of {self.total:,} weights left "
            f"in {len(self.sites)} matrices"
        )
        text = table(counts, title)
        print(text)
        return text
