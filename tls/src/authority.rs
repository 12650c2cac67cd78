//! Authority of a fleet: a key that signs the certificates of its routers and nodes, in a folder
//! that all its routers share.
//!
//! A node's own key and its signing request are here, too.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::certificate_info::{check_name, expires_at, node_uri, token_uri};
use crate::files::{make_folder, read, write_new, write_public};
use crate::{BACKDATE_SECONDS, CertificateInfo, Fingerprint, ROUTER_NAME, TlsError, read_private, write_private};

/// File name of the authority's certificate, which anybody may read.
const CERTIFICATE: &str = "ca.crt";

/// File name of the authority's key.
///
/// Whoever has the key can pose as any router or node of the fleet.
const KEY: &str = "ca.key";

const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[derive(Debug)]
pub struct Authority {
    fleet: String,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

/// A newly signed certificate in DER, and its content.
#[derive(Debug, Clone)]
pub struct IssuedCertificate {
    pub certificate: Vec<u8>,
    pub info: CertificateInfo,
}

/// A certificate for the edge's clients, and its key, both in PEM.
pub struct EdgeCertificate {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    /// Creates the authority of a new fleet in `folder`.
    ///
    /// # Errors
    /// When an authority already exists, the name is invalid, or the folder cannot be written.
    pub fn create(folder: &Path, fleet: &str) -> Result<Self, TlsError> {
        check_name(fleet)?;
        make_folder(folder)?;
        if folder.join(KEY).exists() || folder.join(CERTIFICATE).exists() {
            return Err(TlsError::Exists(folder.to_owned()));
        }
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, fleet);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        set_validity(&mut params, AUTHORITY_LIFETIME);
        let certificate = params.self_signed(&key)?;
        // Write the key first: a folder with only a key is no authority yet, and the key has signed
        // nothing.
        write_new(&folder.join(KEY), key.serialize_pem().as_bytes())?;
        write_public(&folder.join(CERTIFICATE), certificate.pem().as_bytes())?;
        Self::load(folder)
    }

    /// Loads the authority in `folder`.
    ///
    /// # Errors
    /// When the authority is missing or damaged, or others may read its key.
    pub fn load(folder: &Path) -> Result<Self, TlsError> {
        let (certificate_file, key_file) = (folder.join(CERTIFICATE), folder.join(KEY));
        if !certificate_file.exists() || !key_file.exists() {
            return Err(TlsError::NoAuthority(folder.to_owned()));
        }
        let wrong = |what: &str| TlsError::Content { path: certificate_file.clone(), what: what.to_owned() };
        let certificate = CertificateDer::from_pem_slice(&read(&certificate_file)?).map_err(|_| wrong("no certificate is in it"))?;
        let pem = String::from_utf8(read_private(&key_file)?).unwrap_or_default();
        let key = KeyPair::from_pem(&pem)
            .map_err(|_| TlsError::Content { path: key_file, what: "no key of a kind that is known is in it".into() })?;
        let fleet = {
            let (_, parsed) = X509Certificate::from_der(&certificate).map_err(|_| wrong("its certificate cannot be read"))?;
            if Fingerprint::of_key(parsed.public_key().raw) != Fingerprint::of_key(&key.subject_public_key_info()) {
                return Err(wrong("it is not the certificate of the key in ca.key beside it: bring back the pair"));
            }
            let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
            name.ok_or_else(|| wrong("it does not name its fleet"))?.to_owned()
        };
        let issuer = Issuer::from_ca_cert_der(&certificate, key)?;
        Ok(Self { fleet, issuer, certificate })
    }

    #[must_use]
    pub fn fleet(&self) -> &str {
        &self.fleet
    }

    /// Fingerprint by which agents know the authority.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of_key(&self.issuer.key().subject_public_key_info())
    }

    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// When the authority's certificate expires, and with it all that it has signed: Unix time in
    /// seconds.
    #[must_use]
    pub fn expires_at(&self) -> Option<u64> {
        expires_at(&self.certificate)
    }

    /// Signs a node's certificate.
    ///
    /// Only the key in the request counts; the caller has decided the node's name.
    ///
    /// # Errors
    /// When the request is damaged, does not prove that its sender has the key, or a name cannot
    /// stand in a certificate.
    pub fn issue(&self, node: &str, token: &str, request: &[u8], lifetime: Duration) -> Result<IssuedCertificate, TlsError> {
        check_name(node)?;
        let request = parse_request(request)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, node);
        let uri = |uri: String| uri.as_str().try_into().map(SanType::URI);
        params.subject_alt_names = vec![uri(node_uri(&self.fleet, node))?, uri(token_uri(&self.fleet, token))?];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, lifetime);
        let certificate = params.signed_by(&request.public_key, &self.issuer)?.der().to_vec();
        let certified =
            CertificateInfo::parse(&certificate).ok_or_else(|| TlsError::Crypto("the new certificate cannot be read".into()))?;
        Ok(IssuedCertificate { certificate, info: certified })
    }

    /// Fingerprint of the key in a signing request.
    ///
    /// # Errors
    /// When the request is damaged, or does not prove that its sender has the key.
    pub fn requested_key(request: &[u8]) -> Result<Fingerprint, TlsError> {
        Ok(Fingerprint::of_key(&parse_request(request)?.public_key.subject_public_key_info()))
    }

    /// Signs a certificate for the edge under these names, valid as long as an authority.
    ///
    /// Its clients trust `ca.crt`.
    ///
    /// # Errors
    /// When a name is neither an address nor ASCII, or the cryptographic library fails.
    pub fn issue_edge(&self, names: &[String]) -> Result<EdgeCertificate, TlsError> {
        let (certificate, key) = self.issue_server("edge", names.to_vec(), AUTHORITY_LIFETIME)?;
        Ok(EdgeCertificate { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// Signs an edge certificate for a process that keeps it in memory, where nobody renews it.
    pub(crate) fn issue_edge_in_memory(
        &self,
        names: &[String],
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
        let (certificate, key) = self.issue_server("edge", names.to_vec(), AUTHORITY_LIFETIME)?;
        Ok((vec![certificate.der().clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into()))
    }

    /// Issues a certificate for a router, with its key.
    pub(crate) fn issue_router(&self, lifetime: Duration) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
        let (certificate, key) = self.issue_server("router", vec![ROUTER_NAME.to_owned()], lifetime)?;
        // Include the authority's own certificate, since a joining agent has only its fingerprint.
        Ok((vec![certificate.der().clone(), self.certificate.clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into()))
    }

    fn issue_server(&self, holder: &str, names: Vec<String>, lifetime: Duration) -> Result<(Certificate, KeyPair), TlsError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, holder);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, lifetime);
        Ok((params.signed_by(&key, &self.issuer)?, key))
    }
}

fn parse_request(request: &[u8]) -> Result<CertificateSigningRequestParams, TlsError> {
    CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request))
        .map_err(|error| TlsError::Request(error.to_string()))
}

/// Sets the validity from a little before now until `lifetime` from now.
fn set_validity(params: &mut CertificateParams, lifetime: Duration) {
    let now = SystemTime::now();
    params.not_before = (now - Duration::from_secs(BACKDATE_SECONDS)).into();
    params.not_after = (now + lifetime).into();
}

#[derive(Debug)]
pub struct NodeKey(KeyPair);

impl NodeKey {
    /// Loads the key in this file, or creates it.
    ///
    /// # Errors
    /// When the file is damaged, others may read it, or it cannot be written.
    pub fn load_or_create(path: &Path) -> Result<Self, TlsError> {
        if !path.exists() {
            path.parent().map_or(Ok(()), make_folder)?;
            let pem = KeyPair::generate()?.serialize_pem();
            // Another process of this node may be first; then its key counts. If there are no hard
            // links, the last key counts.
            if write_new(path, pem.as_bytes()).is_err() && !path.exists() {
                write_private(path, pem.as_bytes())?;
            }
        }
        let pem = String::from_utf8(read_private(path)?).unwrap_or_default();
        let damaged = |_| TlsError::Content {
            path: path.to_owned(),
            what: "no key of a kind that is known is in it: remove it, and the node joins with a new one".into(),
        };
        Ok(Self(KeyPair::from_pem(&pem).map_err(damaged)?))
    }

    /// Creates a certificate signing request in DER, which proves that its sender has the key.
    ///
    /// # Errors
    /// When the cryptographic library fails.
    pub fn request(&self) -> Result<Vec<u8>, TlsError> {
        Ok(CertificateParams::default().serialize_request(&self.0)?.der().to_vec())
    }

    /// Fingerprint of the public key.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of_key(&self.0.subject_public_key_info())
    }

    pub(crate) fn secret(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.0.serialize_der()).into()
    }
}
