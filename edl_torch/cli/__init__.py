"""The command line `edl-torch`: a module for each command, imported when it is asked for."""
