"""Write job files for schedulers that start a run on several machines (``gym train --launch``)."""
