"""The master over grpc, as a trainer sees it."""
