"""Agent frameworks on AKV: a module for each, which imports its framework. Importing `akv_sdk` imports none of them."""
