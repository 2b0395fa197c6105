"""Compare policies on virtual clusters, with intervals."""
