"""Cost and effect of privacy: epsilon by two accounts, loss against epsilon, and attacks on what is released.

    python benchmarks/privacy.py [--quick] [--json] [--plot FILE] [--parts NAME ...] [--only TEXT] [--folder FOLDER]

1. Our reported epsilon, compared with dp-accounting's privacy loss distributions composed one release at a time.
2. One round of contributors who train gym-nano on a task, merged with noise: held-out loss against epsilon, for deltas
   from all weights down to a thousand numbers. The clipping norm is fixed before the round: it is the median norm of a
   rehearsal on rows that no contributor has, so it reveals nothing about them and costs no privacy. The column for n
   contributors is measured. Columns for more contributors use the same mean with the noise of that number,
   which is smaller because one contributor weighs less among them.
3. Contributors with secrets in their data. Membership: how well somebody who sees the soup (or, on the hub, a single
   update) can distinguish training rows from other rows (area under the curve; 0.5 is chance). Exposure: the rank of
   the true code among 256 codes (in bits, Carlini et al. 2019; 1.4 is chance, 8 is first place). Both are measured
   without privacy, with noise on the hub, and with DP-SGD at every contributor, for one-bit updates and LoRA factors.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from _private_rounds import Round, Size, other_codes, secrets_of, sizes, task_rows
from _report import Report, options, show
from dp_accounting.pld import PLDAccountant

from gym_fed.config.hub.privacy import LocalPrivacy, ReleasePrivacy
from gym_fed.data import generate
from gym_fed.privacy.accountant import NoiseEvent, epsilon, noise_multiplier_for

TARGET_DELTA = 1e-5
EPSILONS = (1.0, 4.0, 16.0)
POPULATIONS = (200, 1_000)
REHEARSAL = range(5000, 5004)
"""Contributors outside the round whose rows are used to estimate the norm of updates."""
PARTS = ("accounts", "utility", "attacks")
SECRETS, CANARIES, CANARY_REPEATS, CANDIDATES = 20, 4, 4, 255
ATTACK_EPSILON = 8.0
ATTACKED = ("full, 1 bit", "LoRA r=16, all")


def accounts(report: Report) -> None:
    worst = 0.0
    for noise, sampling, count in (
        (0.8, 1.0, 1),
        (2.0, 1.0, 10),
        (4.0, 1.0, 100),
        (1.0, 0.01, 500),
        (0.7, 0.1, 50),
    ):
        theirs = PLDAccountant()
        event: Any = dp_accounting.GaussianDpEvent(noise)
        if sampling < 1:
            event = dp_accounting.PoissonSampledDpEvent(sampling, event)
        for _ in range(count if sampling == 1 else 1):
            theirs.compose(event, 1 if sampling == 1 else count)
        ours = epsilon(
            [NoiseEvent(noise_multiplier=noise, sampling_probability=sampling, count=count)], TARGET_DELTA
        )
        peer = theirs.get_epsilon(TARGET_DELTA)
        worst = max(worst, abs(ours - peer))
        report.compare(f"epsilon of {count} x z={noise:g} q={sampling:g}", ours, peer)
    report.aim("epsilon off dp-accounting's", worst, 1e-3)


def utility(report: Report, contributors: int, steps: int, folder: Path, only: str = "") -> None:
    """Report the held-out loss against epsilon, for every size of delta."""
    heldout = generate("dash", 100, seed=5, split="heldout")
    rows: list[list[str]] = []
    columns = [(n, target) for n in (contributors, *POPULATIONS) for target in EPSILONS]
    for size in (one for one in sizes(steps) if only in one.name):
        found = Round(size, [task_rows(i, 48) for i in range(contributors)], folder / _key(size.name))
        clip = Round(
            size, [task_rows(i, 48) for i in REHEARSAL], folder / f"{_key(size.name)}_rehearsal"
        ).median_norm()
        report.figure(f"clip_{_key(size.name)}", clip)
        report.figure(f"clipped_{_key(size.name)}", found.longer_than(clip))
        clean, base = found.loss(found.soup(), heldout), found.loss(found.base.model, heldout)
        row = [size.name, f"{found.coordinates():,}", f"{clean:.2f}"]
        for population, target in columns:
            noise = noise_multiplier_for(target, TARGET_DELTA) * contributors / population
            private = ReleasePrivacy(noise_multiplier=noise, clipping_norm=clip)
            loss = found.loss(found.soup(private), heldout)
            report.figure(f"loss_{_key(size.name)}_n{population}_e{target:g}", loss)
            row.append(f"{loss:.2f}")
        report.figure(f"loss_{_key(size.name)}_no_noise", clean)
        if "loss_base" not in report.figures:
            report.figure("loss_base", base)
        rows.append(row)
    headers = ("delta", "numbers", "no noise", *(f"e={target:g}\nn={n:,}" for n, target in columns))
    title = "held-out loss of one round, by epsilon and contributors"
    show(title, headers, rows, f"the base has {report.figures['loss_base']:.2f}")


def attacks(report: Report, size: Size, contributors: int, steps: int, folder: Path) -> None:
    """Report the success of attacks on the soup and on a single update, for each kind of privacy."""
    canaries = {i: secrets_of(i, CANARIES, "canary") for i in (*range(contributors), *REHEARSAL)}
    rows = {i: task_rows(i, 40) + secrets_of(i, SECRETS) + canaries[i] * CANARY_REPEATS for i in canaries}
    data = [rows[i] for i in range(contributors)]
    heldout = generate("dash", 100, seed=5, split="heldout")
    batch = size.recipe.per_device_train_batch_size
    sampling = batch / len(data[0])
    noise = noise_multiplier_for(ATTACK_EPSILON, TARGET_DELTA, sampling_probability=sampling, count=steps)
    local = LocalPrivacy(noise_multiplier=noise, max_grad_norm=1.0, target_delta=TARGET_DELTA)
    plain = Round(size, data, folder / "plain")
    private = Round(size, data, folder / "private", local=local)
    clip = Round(size, [rows[i] for i in REHEARSAL], folder / "rehearsal").median_norm()
    central = ReleasePrivacy(
        noise_multiplier=noise_multiplier_for(ATTACK_EPSILON, TARGET_DELTA), clipping_norm=clip
    )
    rows_of: list[list[str]] = []
    for name, found, model in (
        ("none", plain, plain.soup()),
        ("central", plain, plain.soup(central)),
        ("local", private, private.soup()),
    ):
        everyone = range(contributors)
        loss = found.loss(model, heldout)
        own = [found.tuned(i) for i in everyone]
        membership = _membership(found, model, everyone)
        membership_hub = float(np.mean([_membership(found, tuned, [i]) for i, tuned in enumerate(own)]))
        bits = float(np.mean([_exposure(found, model, canary) for i in everyone for canary in canaries[i]]))
        bits_hub = float(
            np.mean([_exposure(found, own[i], canary) for i in everyone for canary in canaries[i]])
        )
        for key, value in (
            ("task_loss", loss),
            ("auc_soup", membership),
            ("auc_hub", membership_hub),
            ("exposure_soup_bits", bits),
            ("exposure_hub_bits", bits_hub),
        ):
            report.figure(f"attack_{_key(size.name)}_{name}_{key}", value)
        figures = (
            f"{loss:.2f}",
            f"{membership:.3f}",
            f"{membership_hub:.3f}",
            f"{bits:.2f}",
            f"{bits_hub:.2f}",
        )
        rows_of.append([name, *figures])
    title = f"attacks on {size.name}, epsilon {ATTACK_EPSILON:g} where private"
    headers = ("privacy", "task loss", "rows found: soup", "at the hub", "exposure: soup", "at the hub")
    show(title, headers, rows_of)


def _membership(found: Round, model: Any, contributors: Any) -> float:
    """Return the area under the curve for distinguishing members from others by the decrease of a row's loss."""
    falls = []
    for kind in ("member", "outsider"):
        rows = [row for i in contributors for row in secrets_of(i, SECRETS, kind)]
        falls.append(found.losses(found.base.model, rows) - found.losses(model, rows))
    members, others = falls
    return float(np.mean((members[:, None] > others) + 0.5 * (members[:, None] == others)))


def _exposure(found: Round, model: Any, canary: dict[str, Any]) -> float:
    """Return log2 of the list's length minus log2 of the canary's rank, sorted by the decrease of each code's loss."""
    rows = [canary, *other_codes(canary, CANDIDATES)]
    falls = found.losses(found.base.model, rows) - found.losses(model, rows)
    place = 1 + int(np.count_nonzero(falls[1:] > falls[0]))
    return math.log2(len(rows)) - math.log2(place)


def _key(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower()).replace("__", "_").strip("_")


def main() -> None:
    parser = options("what privacy costs and keeps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="of the three")
    parser.add_argument("--only", metavar="TEXT", default="", help="deltas whose names hold it")
    parser.add_argument("--folder", type=Path, help="keep the updates that were trained, and train each once")
    arguments: argparse.Namespace = parser.parse_args()
    report = Report("privacy", peer=f"dp-accounting {version('dp-accounting')}")
    began = time.perf_counter()
    if "accounts" in arguments.parts:
        accounts(report)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        contributors, steps = (4, 15) if arguments.quick else (32, 40)
        if "utility" in arguments.parts:
            utility(report, contributors, steps, folder / "utility", arguments.only)
        if "attacks" in arguments.parts:
            contributors, steps = (2, 15) if arguments.quick else (8, 80)
            for size in sizes(steps):
                if size.name in ATTACKED and arguments.only in size.name:
                    attacks(report, size, contributors, steps, folder / "attacks" / _key(size.name))
    report.figure("seconds", time.perf_counter() - began)
    report.finish(arguments)


if __name__ == "__main__":
    main()
