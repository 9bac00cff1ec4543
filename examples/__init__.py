"""Training scripts as users write them, with Sentinel attached."""
