"""Small bridges to other people's packages that do not fit together by themselves; one module per package."""
