"""MaxCompute (ODPS) tables by row range."""
