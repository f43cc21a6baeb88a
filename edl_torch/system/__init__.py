"""What several rooms ask of the machine: addresses, processes, forks, SIGTERM, names unknown to the dead."""
