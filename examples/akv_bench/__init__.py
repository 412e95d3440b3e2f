"""The benchmark: recorded agents replayed against any server, AKV beside other ways to keep a context small."""
