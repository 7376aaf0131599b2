"""Manifests for Kubernetes and KServe, of pods in which Triton serves a model repository."""
