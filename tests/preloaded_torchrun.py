"""torchrun whose workers find torch imported.

    python preloaded_torchrun.py TORCHRUN'S ARGUMENTS

They are forks of this process as it was before torchrun began. `preloaded.Popen` starts it as a fork, too.
"""

import preloaded
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

if __name__ == "__main__":
    preloaded.fork_from_here()
    subprocess_handler.Popen = preloaded.Popen
    run.main()
