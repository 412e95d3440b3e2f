"""A bash agent for SWE-bench over the AKV SDK: instances in, `preds.json` and trajectories out."""
