"""Names that writers and readers of a file share; importing this needs nothing else of the package."""

DOMAIN = "nnorm"
DOMAIN_VERSION = 1

# Model metadata that export() writes: nnorm_export.version, .form, .layers, …
METADATA_PREFIX = "nnorm_export."
# Metadata of a node: the path of the layer that it came from.
LAYER_PATH = METADATA_PREFIX + "layer"
