"""What several rooms ask of the machine: addresses, processes, forks, SIGTERM, pauses, names that no dead
process knew."""
