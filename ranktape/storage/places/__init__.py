"""Where a run can lie: a local directory, an object store, or any file system of fsspec."""
