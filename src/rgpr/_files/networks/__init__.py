"""Networks by name with weights from a file, and programs that hold a network too (``.pt2``)."""
