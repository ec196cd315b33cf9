"""Who is who: the authority, certificates, the signed roster."""
