"""ElasticDL's protocol, from both sides.

Its unmodified clients on our master's port (`servicer`, `adapter`), and its master as a trainer of ours sees
it (`client`, `dataset`, `tasks`). `calls` has its calls as values, `wire` turns them into bytes.
"""
