"""What several rooms ask of the machine: addresses, processes, forks, names that no dead process knows."""
