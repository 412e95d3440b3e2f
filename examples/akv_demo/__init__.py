"""The demo: a scripted coding agent on a real repository, AKV beside other ways to keep a context small."""
