"""The texts with which a scheduler starts a run on several machines: ``gym train --launch``."""
