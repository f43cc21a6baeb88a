"""An ElasticDL master as a trainer of ours sees it."""
