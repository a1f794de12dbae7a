"""Criteria: how important a weight is. Those that rank weights by their values and gradients, simplest first.

A criterion sees one `Site` at a time and gives scores; larger means keep. It may `observe` the site at every optimiser
step, either `before` the step (weight_t, grad_t) or `after` it (weight_t+1, grad_t), and keep what it measures in
`site.state`. To add one, write a dataclass and register it; nothing else needs to change. Class attributes declare what
it can and cannot do.

PINS minimises the first-order change of the loss, sum_i g_i (x_i dθ_i - (1 - x_i) θ_i) under sum x_i = r, by keeping
the r weights with the largest S_i = -g_i dθ_i - g_i θ_i. With dθ = -lr g this is S = lr g² - g θ.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from pinscher import native, settings
from pinscher.prune.masking import PART, Scores, parts
from pinscher.prune.sites import Site
from pinscher.prune.weights import Weights
from pinscher.registry import Registry
from pinscher.settings import COUNT, FRACTION, SEED, Names, setting

if TYPE_CHECKING:
    from pinscher.prune.calibration import Batches
    from pinscher.prune.ranking import Ranking
    from pinscher.prune.schedule import Schedule

CRITERIA: Registry[type[Criterion]] = Registry("method")


@dataclass
class Criterion:
    """The interface. The fields of a subclass are its options; it overrides `scores` and whatever else it needs.

    A field may say which values it takes: `beta: float = setting(0.9, takes=FRACTION)` (see `pinscher.settings`).
    """

    scope: ClassVar[Literal["global", "matrix"]] = "global"  # what is ranked together
    needs_grad: ClassVar[bool] = True
    schedule: ClassVar[str | None] = None  # the schedule, if only one makes sense
    hold: ClassVar[str | None] = None  # likewise
    chooses: ClassVar[bool] = False  # whether it chooses masks by itself, unless a pattern or a scope is given
    measures_first: ClassVar[bool] = False  # whether the steps before the first ranking only measure and train nothing
    weights: ClassVar[type[Weights]] = Weights  # how its masks reach the weights
    learns_masks: ClassVar[bool] = False  # whether masks are trained; they are exact only at the end
    needs_calibration: ClassVar[bool] = False  # whether it needs batches of model inputs
    adaptable: ClassVar[bool] = True  # whether it works with weights frozen below adapters: it must not change them
    unshardable: ClassVar[str | None] = None  # why sharded weights cannot be used, and what to do instead
    searched: ClassVar[tuple[str, tuple[float, ...]] | None] = None  # its main option, with values to try

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        """When a site is observed: before or after the optimiser's step; never for learned masks."""
        return "after"

    @property
    def lasting(self) -> bool:
        """Whether scores stay the same until the next ranking, so that the mask need not be stored."""
        return False

    @classmethod
    def prunes_once(cls) -> bool:
        """Whether it can prune a model without training it."""
        return not cls.needs_grad

    def calibration_rows(self, batch_size: int) -> int:
        """The number of data rows that it needs to prune once, in batches of this size."""
        return 0

    def cooldown(self, steps: int, total: int) -> int:
        """The steps of the cool-down, out of `total`, given the number that the user asked for.

        Raises:
            ValueError: if the run is too short.
        """
        return steps

    # ------------------------------------------------------------ scores

    def prepare(self, site: Site, state_dtype: torch.dtype) -> None:
        """Creates `site.state`. The last dimension of floating-point tensors runs over this rank's weights. Other
        tensors do not belong to single weights and are the same on every rank.
        """

    def observe(self, site: Site, t: int, closing: int) -> None:
        """Looks at the site in step t. `closing` is how many steps were observed if the interval ends, else 0."""

    def scores(self, site: Site) -> Scores:
        """The scores of a site, shaped like its weight."""
        raise NotImplementedError

    # ------------------------------------------------------------ masks

    def ready(self, site: Site) -> None:
        """Called for every site just before the weights are ranked."""

    def choose_masks(
        self, ranking: Ranking, density: float, model: nn.Module, batches: Batches | None, scope: str | None
    ) -> None:
        """Chooses the weights to keep; may change them to compensate for those that are pruned.

        Args:
            ranking: receives the masks.
            density: fraction of the weights to keep.
            model: the model, for methods that run it on calibration data.
            batches: the calibration data.
            scope: the scope that the user asked for, if any.
        """
        ranking.rank(density)
        for site in ranking.sites if ranking.pruned else ():
            self.compensate(site, ranking.pruned[site.name])

    def compensate(self, site: Site, pruned: Tensor) -> None:
        """Called after a ranking with the flat mask (True is pruned); may change the remaining weights."""

    # ------------------------------------------------------------ learned masks

    def add_penalty(self, ranking: Ranking, schedule: Schedule, t: int) -> None:
        """Adds the gradient of the penalty, after accumulation, unscaling and clipping."""

    def steer(self, ranking: Ranking, schedule: Schedule, t: int) -> None:
        """Brings learned masks to the schedule's density after step t."""


@CRITERIA.register("magnitude")
@dataclass
class Magnitude(Criterion):
    """|θ| (Zhu & Gupta 2017); in the paper's tables "IMP"."""

    needs_grad: ClassVar[bool] = False

    def scores(self, site: Site) -> Scores:
        return Scores(site.weight, combine=torch.abs)


@CRITERIA.register("magnitude-oneshot")
@dataclass
class MagnitudeOneShot(Magnitude):
    """|θ| once, after dense fine-tuning; the cool-down is the recovery."""

    schedule: ClassVar[str | None] = "one-shot"
    hold: ClassVar[str | None] = "always"


@CRITERIA.register("random")
@dataclass
class Random(Criterion):
    """A hash of (seed, site, index) as score, the same on any host: the control."""

    seed: int = setting(0, takes=SEED)

    needs_grad: ClassVar[bool] = False

    def scores(self, site: Site) -> Scores:
        drawn = hashed_uniform(self.seed, site.name, site.weight.numel(), site.start)
        return Scores(drawn.to(site.weight.device))


@dataclass
class Smoothed(Criterion):
    """Scores from a quantity of the step, smoothed over steps as PLATON does.

    "window": the mean over an interval is folded into the averages at its end; "ema": every step is; "none": only the
    step of the ranking counts. With S the (mean) quantity:

        I <- beta1 I + (1 - beta1) S          U <- beta2 U + (1 - beta2) |S - I|          score = I U

    A quantity that can be negative is never multiplied by U: its score is I.
    """

    smoothing: str = setting("window", takes=Names(("window", "ema", "none")))
    beta1: float = setting(0.85, takes=FRACTION)
    beta2: float = setting(0.95, takes=FRACTION)

    @property
    def signed(self) -> bool:
        return False

    @property
    def lasting(self) -> bool:
        return self.smoothing == "window"

    def quantity(self, weight: Tensor, grad: Tensor, lr: float, out: Tensor) -> Tensor:
        """The unsmoothed score of matching pieces of weight and gradient, written to `out`: |g θ| unless overridden."""
        return torch.mul(weight, grad, out=out).abs_()

    def prepare(self, site: Site, state_dtype: torch.dtype) -> None:
        names = {"window": ["sum", "mean"], "ema": ["mean"], "none": []}[self.smoothing]
        if names and not self.signed:
            names.append("spread")
        dtype = torch.float64 if site.owner.dtype == torch.float64 else state_dtype
        for name in names:
            site.state[name] = torch.zeros_like(site.weight, dtype=dtype)

    @property
    def fused(self) -> Literal["weight", "step"] | None:
        """The quantity that native code can smooth: |g θ|, |g (θ - lr g)|, or none."""
        return "weight" if type(self).quantity is Smoothed.quantity else None

    def observe(self, site: Site, t: int, closing: int) -> None:
        if self.smoothing == "none":
            return
        done = self._observe_natively(site, closing)
        for at, now in self._quantities(site, done):
            if self.smoothing == "ema":
                self._fold(site, at, now, t)
                continue
            total = site.state["sum"][at]
            if closing:
                self._fold(site, at, now.add_(total).div_(closing), t)
                total.zero_()
            else:
                _store(total, total.to(now.dtype).add_(now), t)

    def scores(self, site: Site) -> Scores:
        if self.smoothing == "none":
            if site.grad is None:
                return Scores(site.weight, combine=lambda w, out: out.zero_())
            return Scores(site.weight, site.grad, combine=lambda w, g, out: self._quantity(site, w, g, out))
        mean, spread = site.state["mean"], site.state.get("spread")
        if spread is None:
            return Scores(mean)
        return Scores(mean, spread, combine=torch.mul)

    def _fold(self, site: Site, at: slice, now: Tensor, t: int) -> None:
        mean = site.state["mean"][at]
        new_mean = mean.to(now.dtype).lerp_(now, 1 - self.beta1)  # in place where the precision is the same
        _store(mean, new_mean, t)  # this rounds new_mean too: the spread is around the stored mean
        if "spread" in site.state:
            spread = site.state["spread"][at]
            _store(spread, spread.to(now.dtype).lerp_(now.sub_(new_mean).abs_(), 1 - self.beta2), t)

    def _observe_natively(self, site: Site, closing: int) -> int:
        """Does what `observe` does, to the last bit, for as many of the first weights as it can."""
        state = [site.state.get(name) for name in ("sum", "mean", "spread")]
        tensors = [site.weight, site.grad, *state]
        plain = all(t is not None and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        small = max(1 - self.beta1, 1 - self.beta2) < 0.5  # torch interpolates from the other end above that
        core = native.core() if plain and small and self.fused and site.grad_scale == 1.0 else None
        if core is None or self.smoothing != "window" or native.isa() == "scalar":  # it does not fuse as torch does
            return 0
        flat = [t.detach().view(-1) for t in tensors if t is not None]
        if not all(t.is_contiguous() for t in flat):
            return 0
        weight, grad, *sums = (t.numpy() for t in flat)
        threads, isa, steps = native.pool(torch.get_num_threads()), native.isa(), self.fused == "step"
        if not closing:
            left = core.observe(threads, isa, weight, grad, site.lr, steps, sums[0])
        else:
            shares = 1 - self.beta1, 1 - self.beta2
            left = core.fold(threads, isa, weight, grad, site.lr, steps, *sums, closing, *shares)
        return len(weight) - int(left)

    def _quantities(self, site: Site, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
        weight, grad = site.weight, site.grad
        if grad is None:  # the matrix was not used in this step
            grad = torch.zeros_like(weight)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        buffer = torch.empty(min(PART, weight.numel()), dtype=dtype, device=weight.device)
        for part in parts(weight.numel() - start):
            at = slice(start + part.start, start + part.stop)
            yield at, self._quantity(site, weight[at], grad[at], buffer[: at.stop - at.start])

    def _quantity(self, site: Site, weight: Tensor, grad: Tensor, out: Tensor) -> Tensor:
        grad = grad.to(out.dtype)
        if site.grad_scale != 1.0:
            grad = grad / site.grad_scale
        return self.quantity(weight.to(out.dtype), grad, site.lr, out)


@CRITERIA.register("sensitivity")
@dataclass
class Sensitivity(Smoothed):
    """|g θ| of the step of the ranking alone. Smoothed, it would be platon."""

    smoothing: str = setting("none", takes=Names(("none",)))

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        return "before"


@CRITERIA.register("platon")
@dataclass
class Platon(Smoothed):
    """|g θ| smoothed, times its own uncertainty (Zhang et al. 2022).

    `timing`: "after" is |g_t θ_t+1|, as the public code computes it; "before" is |g_t θ_t|, as the paper writes it.
    """

    smoothing: str = setting("window", takes=Names(("window", "ema")))
    timing: str = setting("after", takes=Names(("after", "before")))

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        return "before" if self.timing == "before" else "after"


@CRITERIA.register("pins")
@dataclass
class Pins(Smoothed):
    """The paper's criterion, S = -g dθ - g θ.

    `score`: "abs" is |lr g² - g θ_t|, as the reference code; "signed" is lr g² - g θ_t, the paper's equation, for which
    (with smoothing="none") the top-r mask is provably optimal; "update" takes the optimiser's own step instead of
    -lr g, which makes it -g_t θ_t+1.
    """

    score: str = setting("abs", takes=Names(("abs", "signed", "update")))
    beta2: float = setting(0.99, takes=FRACTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signed and self.smoothing != "none":
            warnings.warn(
                f"pins with score={self.score!r} and smoothing={self.smoothing!r}: averages of signed scores are "
                "mostly noise and fell to chance in trials. Use score='abs', or smoothing='none' for the optimum.",
                stacklevel=3,
            )

    @property
    def signed(self) -> bool:
        return self.score != "abs"

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        return "after" if self.score == "update" else "before"

    @property
    def fused(self) -> Literal["weight", "step"] | None:
        return "step" if self.score == "abs" else None

    def quantity(self, weight: Tensor, grad: Tensor, lr: float, out: Tensor) -> Tensor:
        if self.score == "update":
            return torch.mul(weight, grad, out=out).neg_()
        torch.sub(weight, grad, alpha=lr, out=out).mul_(grad)  # g θ - lr g², the negative of the score
        return out.abs_() if self.score == "abs" else out.neg_()


@CRITERIA.register("snip")
@dataclass
class Snip(Smoothed):
    """|g θ| summed over a few batches before training (Lee et al. 2018); the mask is then fixed.

    The first `batches` steps only measure: their gradients are dropped, so the optimiser changes nothing.
    """

    smoothing: str = setting("none", takes=Names(("none",)))
    batches: int = setting(10, takes=COUNT)

    schedule: ClassVar[str | None] = "one-shot"
    hold: ClassVar[str | None] = "always"
    measures_first: ClassVar[bool] = True

    def cooldown(self, steps: int, total: int) -> int:
        """All steps after the measuring; they train with the mask."""
        if self.batches >= total:
            raise ValueError(f"snip measures {self.batches} batches but the run has {total} steps")
        return total - self.batches

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        return "before"

    def prepare(self, site: Site, state_dtype: torch.dtype) -> None:
        dtype = torch.float64 if site.owner.dtype == torch.float64 else torch.float32
        site.state["sum"] = torch.zeros_like(site.weight, dtype=dtype)

    def observe(self, site: Site, t: int, closing: int) -> None:
        if t <= self.batches:
            for at, now in self._quantities(site):
                site.state["sum"][at].add_(now)

    def scores(self, site: Site) -> Scores:
        return Scores(site.state["sum"])


def hashed_uniform(seed: int, name: str, numel: int, offset: int = 0) -> Tensor:
    """Uniform numbers in [0, 1) that depend only on (seed, name, index): a 64-bit mix of the index, its top 24 bits."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)
    values = torch.empty(numel)
    for at in parts(numel):
        x = torch.arange(offset + at.start, offset + at.stop, dtype=torch.int64).mul_(-7046029254386353131).add_(key)
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)  # a logical shift
        values[at] = (x >> 40).bitwise_and_((1 << 24) - 1).float().div_(1 << 24)
    return values


def _store(target: Tensor, values: Tensor, t: int) -> None:
    """Writes fp32 values to state; to bf16 with rounding that is unbiased over time.

    Rounding to nearest would freeze an average whose updates are smaller than half a unit in the last place. Instead
    the rounding point moves with t along the golden-ratio sequence: deterministic, so a resumed run is bit-identical.
    """
    if target.dtype != torch.bfloat16:
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)
        return
    offset = int(math.modf(t * 0.6180339887498949)[0] * 65536)
    target.copy_(values.view(torch.int32).add_(offset).bitwise_and_(-65536).view(torch.float32))
