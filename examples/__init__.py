"""Training scripts as people write them, with Sentinel attached."""
