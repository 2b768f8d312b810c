"""Attacks by malicious clients, one per function. All are omniscient: they know the honest updates, rule and data.

An attack takes a ``Scene`` and returns ``[S, f, d]`` updates in the format of the round; in packed rounds,
``scene.sent`` converts them to sign bits and scales. Malicious clients use no error feedback. As in ByzFL, an attack's
strength is searched in every round among a few values against the rule in use. The search maximises the model's loss on
the training data, which is more harmful than ByzFL's distance from the honest mean. To add an attack, decorate a
function with ``@attack``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch
from _digits import Digits
from _scene import LongScene, Scene, unit
from torch import Tensor

TARGET = 0
"""Target label of the backdoor, for images with three white pixels (``Images.trigger``)."""


Attack = Callable[[Scene], Tensor]
ATTACKS: dict[str, Attack] = {}
"""Attacks by name, in the order below."""


def attack(function: Attack) -> Attack:
    """Register an attack under its function's name."""
    ATTACKS[function.__name__] = function
    return function


LONG = "long_"
"""Prefix of an attack whose updates are stretched (``LongScene``)."""


def launched(name: str, scene: Scene) -> Tensor:
    """Return the ``[S, f, d]`` updates of the attack ``name``, which may begin with ``LONG``."""
    if not name.startswith(LONG):
        return ATTACKS[name](scene)
    values = {one.name: getattr(scene, one.name) for one in fields(Scene)}
    long = LongScene(**values)
    return long.sent(ATTACKS[name.removeprefix(LONG)](long))


@attack
def none(scene: Scene) -> Tensor:
    """No attack: the f clients train honestly, each on its sample."""
    return scene.sent(scene.trained())


@attack
def sign_flip(scene: Scene) -> Tensor:
    """Send the negated honest update.

    Allen-Zhu et al. 2020, "Byzantine-Resilient Non-Convex Stochastic Gradient Descent"; Li et al. 2019, RSA.
    """
    return scene.sent(-scene.trained())


@attack
def inflated_scale(scene: Scene) -> Tensor:
    """Send the honest mean times minus one million."""
    return 1e6 * scene.sent(scene.together(-scene.mean))


@attack
def gaussian(scene: Scene) -> Tensor:
    """Send noise with three times the honest spread.

    Blanchard et al. 2017, "Machine Learning with Adversaries".
    """
    shape = (len(scene.model), scene.malicious, scene.model.shape[1])
    return scene.sent(3.0 * scene.updates.std() * torch.randn(shape, generator=scene.generator))


@attack
def zero(scene: Scene) -> Tensor:
    return torch.zeros(len(scene.model), scene.malicious, scene.model.shape[1])


@attack
def alie(scene: Scene) -> Tensor:
    """ "A Little Is Enough": the mean minus z standard deviations (Baruch et al. 2019); z is searched."""
    mean, deviation = scene.mean, scene.deviation
    return scene.worst(scene.together(mean - z * deviation) for z in (-1.0, 0.25, 0.5, 1.0, 1.5, 3.0))


@attack
def inner_product(scene: Scene) -> Tensor:
    """Inner-product manipulation: minus e times the mean (Xie et al. 2019, "Fall of Empires"); e is searched."""
    return scene.worst(scene.together(-e * scene.mean) for e in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0))


@attack
def mimic(scene: Scene) -> Tensor:
    """Copy one honest contributor, the one furthest along the direction in which honest updates differ most.

    Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", section 3.
    """
    centred = scene.deltas - scene.mean[:, None]
    direction = scene.memory.get("direction")
    steps = 2
    if direction is None:
        direction, steps = torch.randn(scene.model.shape, generator=scene.generator), 8
    for _ in range(steps):
        direction = unit((centred.transpose(1, 2) @ (centred @ direction[..., None]))[..., 0])
    scene.memory["direction"] = direction
    seen = scene.memory["seen"] = scene.memory.get("seen", 0) + 1
    if seen in (1, 11):
        scene.memory["copied"] = (scene.deltas @ direction[..., None])[..., 0].argmax(1)
    copied = scene.memory["copied"]
    return scene.together(scene.updates[torch.arange(len(copied)), copied])


@attack
def min_max(scene: Scene) -> Tensor:
    """Maximise the distance from the mean within the largest distance between two honest updates.

    Shejwalkar & Houmansadr 2021, "Manipulating the Byzantine", equation 7: no honest update may be further from the
    malicious one than two honest updates are from each other. The perturbation is searched.
    """
    return scene.worst(_hidden(scene, lambda squares: squares.amax(-1)))


@attack
def min_sum(scene: Scene) -> Tensor:
    """Like ``min_max``, with a bound on the sum of squared distances (equation 8)."""
    return scene.worst(_hidden(scene, lambda squares: squares.sum(-1)))


def _hidden(scene: Scene, measure: Callable[[Tensor], Tensor]) -> Iterable[Tensor]:
    between = torch.cdist(scene.updates, scene.updates) ** 2
    limit = measure(between).amax(1)
    for direction in (-scene.deviation, -scene.mean, -torch.sign(scene.mean)):
        step = unit(direction)
        low, high = torch.zeros(len(step), 1), 100.0 * scene.norm
        for _ in range(25):
            middle = (low + high) / 2
            squares = ((scene.updates - (scene.mean + middle * step)[:, None]) ** 2).sum(2)
            inside = (measure(squares) <= limit)[:, None]
            low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
        yield scene.together(scene.mean + low * step)


@attack
def label_flip(scene: Scene) -> Tensor:
    """Train on label 9 - y instead of y.

    Tolpegin et al. 2020, "Data Poisoning Attacks Against Federated Learning Systems".
    """
    return scene.sent(scene.trained(lambda images, labels: (images, 9 - labels)))


@attack
def backdoor(scene: Scene) -> Tensor:
    """Replace the model with a backdoored one (Bagdasaryan et al. 2020, "How To Backdoor Federated Learning").

    Half of each batch has the trigger and the target label. The update is scaled by n / f, so that the mean becomes the
    malicious model.
    """
    boost = scene.data.contributors / scene.malicious
    return boost * backdoor_unscaled(scene)


@attack
def backdoor_unscaled(scene: Scene) -> Tensor:
    """Train a backdoor as ``backdoor`` does, without scaling, so that the update has an honest length."""

    def triggered_half(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        half = images.shape[1] // 2
        marked = torch.cat([triggered(images[:, :half], scene.data), images[:, half:]], 1)
        return marked, torch.cat([torch.full_like(labels[:, :half], TARGET), labels[:, half:]], 1)

    return scene.sent(scene.trained(triggered_half))


def triggered(images: Tensor, data: Digits) -> Tensor:
    marked = images.clone()
    marked[..., list(data.set.trigger)] = 1.0
    return marked


@attack
def sybil(scene: Scene) -> Tensor:
    """Send one opponent's update under f names: a negated update, trained on all malicious clients' samples."""
    return scene.sent(scene.together(-scene.trained().mean(1)))


@attack
def neighbourhood(scene: Scene) -> Tensor:
    """Attack nearest-neighbour rules, including those with Hamming distance (this project).

    All malicious updates are equal, and as far along a hostile direction as possible while they are among the nearest n
    - f of a share of the honest contributors. Direction and share are searched.
    """
    between = torch.cdist(scene.updates, scene.updates) ** 2
    # Next to f malicious updates there is room for n - 2f honest ones, including the contributor's own.
    room = scene.data.contributors - 2 * scene.malicious - 1
    reach = between.sort(2).values[:, :, room]

    def candidates() -> Iterable[Tensor]:
        for direction in (-scene.mean, ascent(scene)):
            step = unit(direction)
            for share in (0.25, 0.5, 0.75, 1.0):
                low, high = torch.zeros(len(step), 1), 4.0 * scene.norm
                for _ in range(15):
                    middle = (low + high) / 2
                    lie = scene.sent((middle * step)[:, None])
                    near = ((scene.updates - lie) ** 2).sum(2) <= reach
                    inside = (near.float().mean(1) >= share)[:, None]
                    low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
                yield scene.together(low * step)

    return scene.worst(candidates())


@attack
def suppression(scene: Scene) -> Tensor:
    """Attack one contributor, so that a label is forgotten (this project).

    Every round sends the negated update of the contributor that holds the largest part of a label. The strength is
    searched.
    """
    if "victim" not in scene.memory:
        shares = [scene.data.counts(s) for s in range(len(scene.model))]
        scene.memory["victim"] = torch.tensor(
            [int((count / count.sum(0)).max(1).argmax()) for count in shares]
        )
    victim = scene.memory["victim"]
    update = scene.updates[torch.arange(len(victim)), victim]
    return scene.worst(scene.together(-z * update) for z in (0.5, 0.7, 1.0, 1.5))


@attack
def loss_ascent(scene: Scene) -> Tensor:
    """Follow the gradient of the loss on all data upwards (this project); the strength is searched."""
    step = unit(ascent(scene)) * scene.norm
    return scene.worst(scene.together(z * step) for z in (0.3, 0.6, 0.9, 1.2, 2.0, 4.0))


@attack
def camouflage(scene: Scene) -> Tensor:
    """Attack filters of spread and similarity (this project).

    Each malicious update has an honest length. It consists of a harmless cover (noise that sums to zero, or an honest
    update) and a hidden part that all share. The hidden part's size and direction, and the cover, are searched.
    """
    seeds, malicious = len(scene.model), scene.malicious
    noise = torch.randn(seeds, malicious, scene.model.shape[1], generator=scene.generator)
    order = torch.stack(
        [torch.randperm(scene.data.honest, generator=scene.generator)[:malicious] for _ in range(seeds)]
    )
    copies = unit(scene.deltas[torch.arange(seeds)[:, None], order])
    covers = [unit(v - v.mean(1, keepdim=True)) for v in (noise, copies)] + [copies]

    def candidates() -> Iterable[Tensor]:
        for cover in covers:
            for direction in (ascent(scene), -scene.mean):
                for angle in (0.15, 0.3, 0.5, 0.8, 1.2):
                    hidden = math.sin(angle) * unit(direction)[:, None]
                    yield scene.norm[:, None] * (hidden + math.cos(angle) * cover)

    return scene.worst(candidates())


@attack
def near_root(scene: Scene) -> Tensor:
    """Attack rules that trust a root update (this project).

    Every malicious update is the coordinator's own update, which the attacker knows, rotated towards a hostile
    direction. The angle is searched.
    """
    cover = unit(scene.root)

    def candidates() -> Iterable[Tensor]:
        for direction in (ascent(scene), -scene.mean, -scene.deviation):
            for angle in (0.3, 0.8, 1.2, 1.4, 1.55):
                hidden = math.sin(angle) * unit(direction)
                yield scene.together(scene.norm * (hidden + math.cos(angle) * cover))

    return scene.worst(candidates())


@attack
def fitted_rows(scene: Scene) -> Tensor:
    """Attack rules that measure the loss on the coordinator's images (this project).

    The update lowers that loss, and hides the steepest ascent of the loss on all data that leaves it unchanged. The
    angle is searched.
    """
    data = scene.data
    held = torch.tensor([list(one[-1]) for one in data.holdings])
    seeds = torch.arange(len(held))[:, None]
    own = unit(data.network.gradient(scene.model, data.images[seeds, held], data.labels[seeds, held]))
    hostile = ascent(scene)
    hostile = unit(hostile - (hostile * own).sum(1, keepdim=True) * own)

    def candidates() -> Iterable[Tensor]:
        for cover in (-own, unit(scene.root)):
            for angle in (0.3, 0.8, 1.2, 1.4, 1.5, 1.55):
                yield scene.together(scene.norm * (math.sin(angle) * hostile + math.cos(angle) * cover))

    return scene.worst(candidates())


@attack
def drift(scene: Scene) -> Tensor:
    """Follow one hostile direction for the entire run (this project).

    The direction is the update of a round of training on wrong labels from the first model. Every malicious update has
    an honest length, and is a harmless one (the honest update, or noise that sums to zero) rotated towards that
    direction. The angle that moves the soup furthest is searched.
    """
    if "drift" not in scene.memory:
        wrong = scene.trained(lambda images, labels: (images, 9 - labels)).mean(1)
        scene.memory["drift"] = unit(wrong)
    direction = scene.memory["drift"]
    noise = torch.randn(len(scene.model), scene.malicious, scene.model.shape[1], generator=scene.generator)
    covers = [unit(scene.trained()), unit(noise - noise.mean(1, keepdim=True))]

    def candidates() -> Iterable[Tensor]:
        for cover in covers:
            for angle in (0.15, 0.3, 0.5, 0.8, 1.2, math.pi / 2):
                hidden = math.sin(angle) * direction[:, None]
                yield scene.norm[:, None] * (hidden + math.cos(angle) * cover)

    return scene.furthest(candidates(), direction)


def ascent(scene: Scene) -> Tensor:
    """Return the ``[S, d]`` gradient of the loss on all training data."""
    return scene.data.network.gradient(scene.model, scene.data.images, scene.data.labels)


_STRETCHED = (
    "sign_flip",
    "alie",
    "inner_product",
    "mimic",
    "min_max",
    "label_flip",
    "backdoor_unscaled",
    "loss_ascent",
    "camouflage",
    "near_root",
    "fitted_rows",
    "drift",
)
LONG_ATTACKS = tuple(LONG + name for name in _STRETCHED)
"""Attacks that may benefit from a greater length."""
