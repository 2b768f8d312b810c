"""Write the files with which schedulers start a run on several machines (``gym train --launch``)."""
