"""Data in files: arrays (``.npz``), tables (``.parquet``, ``.csv``) and folders of images."""
