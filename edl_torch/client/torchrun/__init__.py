"""Jobs under torchrun: their workers find or start the master, and connect again after a restart.

The only folder of the client that uses torch, which is imported when it is used.
"""

from edl_torch.client.torchrun.job import init_process_group as init_process_group
