"""Pictures of a study, one file each; they only draw."""
