"""The stores of runs: a local directory, an object store, or any file system of fsspec."""
