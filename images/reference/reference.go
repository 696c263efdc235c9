// Package reference reads references to images: the kind of place that an image is in, and its
// name there.
package reference

import (
	_ "crypto/sha512" // digests of it are known, and refused
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	distribution "github.com/distribution/reference"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// Transport is the kind of place that an image comes from or goes to.
type Transport string

// The transports. All but Bootstrap are those of skopeo and Podman, except that
// "dir:" is a root filesystem here.
const (
	Docker            Transport = "docker" // a registry: "docker://NAME", or NAME alone
	DockerDaemon      Transport = "docker-daemon"
	DockerArchive     Transport = "docker-archive"
	OCI               Transport = "oci"
	OCIArchive        Transport = "oci-archive"
	Dir               Transport = "dir"
	ContainersStorage Transport = "containers-storage"
	Bootstrap         Transport = "bootstrap"
)

var transports = []Transport{DockerDaemon, DockerArchive, OCI, OCIArchive, Dir, ContainersStorage, Bootstrap}

// DockerHub is the registry of names without one.
const DockerHub = "docker.io"

const maxReference = 4096

// Reference is a parsed reference to an image.
type Reference struct {
	Transport Transport
	// Name is a whole repository name ("docker.io/library/debian") of Docker,
	// DockerDaemon and ContainersStorage, and optionally of DockerArchive;
	// DISTRIBUTION/SUITE of Bootstrap.
	Name string
	// Tag of Name; of OCI and OCIArchive, what the index calls the image.
	Tag string
	// Digest is sha256:HEX: of a manifest; of DockerDaemon and ContainersStorage
	// without Name, the image's id.
	Digest string
	Path   string     // absolute, of DockerArchive, OCI, OCIArchive and Dir
	Query  url.Values // of Bootstrap

	def string // the default registry that it was parsed with
}

// Patterns of what references may have.
var (
	Digest = lazy.Regexp(`^sha256:[0-9a-f]{64}$`)
	Epoch  = lazy.Regexp(`^[0-9]{1,12}$`) // of a bootstrap
)

// Parse reads [TRANSPORT:]REST. Names without a registry lie at
// defaultRegistry, HOST[:PORT][/PREFIX]; empty: docker.io.
func Parse(s string, defaultRegistry string) (Reference, error) {
	if defaultRegistry == "" {
		defaultRegistry = DockerHub
	}
	r, err := parse(s, strings.TrimSuffix(defaultRegistry, "/"))
	if err != nil {
		return Reference{}, &fault.Error{Op: "read image reference", ID: fmt.Sprintf("%.200q", s), Err: err,
			Hint: "References are NAME[:TAG][@DIGEST], docker://NAME, docker-daemon:NAME, docker-archive:FILE[:NAME], oci:DIR[:TAG], oci-archive:FILE[:TAG], " +
				"dir:ROOTFS, containers-storage:NAME and bootstrap:debian/SUITE[?include=PACKAGE,...]."}
	}
	return r, nil
}

func parse(s, def string) (Reference, error) {
	if len(s) > maxReference || strings.ContainsFunc(s, func(c rune) bool {
		return unicode.IsControl(c) || c == unicode.ReplacementChar
	}) {
		return Reference{}, fmt.Errorf("%w: it is too long, or has characters that do not print", fault.ErrInvalid)
	}
	t, rest := split(s)
	r := Reference{Transport: t, def: def}
	var err error
	switch t {
	case Docker:
		rest, isURL := strings.CutPrefix(rest, "//")
		if !isURL && Digest().MatchString(rest) {
			return r, fmt.Errorf("%w: it is a digest without a name", fault.ErrInvalid)
		}
		err = r.named(rest)
	case DockerDaemon, ContainersStorage:
		if Digest().MatchString(rest) {
			r.Digest = rest
			return r, nil
		}
		err = r.named(rest)
	case Dir:
		err = r.path(rest)
	case OCI, OCIArchive, DockerArchive:
		path, name, tagged := strings.Cut(rest, ":")
		if err = r.path(path); err == nil && strings.Contains(r.Path, ":") {
			err = fmt.Errorf("%w: %q has a colon, which no path here may have", fault.ErrInvalid, r.Path)
		}
		if err != nil || !tagged {
			break
		}
		switch {
		case name == "":
			err = fmt.Errorf("%w: there is nothing behind the colon", fault.ErrInvalid)
		case t == DockerArchive:
			err = r.named(name)
		case strings.HasPrefix(name, "@"):
			if r.Digest = name[1:]; !Digest().MatchString(r.Digest) {
				err = fmt.Errorf("%w: %.100q is not a digest", fault.ErrInvalid, r.Digest)
			}
		default:
			r.Tag = name
		}
	case Bootstrap:
		err = r.bootstrap(rest)
	}
	return r, err
}

// split takes the transport off.
func split(s string) (Transport, string) {
	if rest, ok := strings.CutPrefix(s, "docker://"); ok {
		return Docker, "//" + rest
	}
	if t, rest, ok := strings.Cut(s, ":"); ok && slices.Contains(transports, Transport(t)) {
		return Transport(t), rest
	}
	return Docker, s
}

func (r *Reference) path(p string) error {
	if p == "" {
		return fmt.Errorf("%w: it has no path", fault.ErrInvalid)
	}
	var err error
	r.Path, err = filepath.Abs(p)
	return err
}

// named reads NAME[:TAG][@DIGEST].
func (r *Reference) named(s string) error {
	if r.def != DockerHub && !hasRegistry(s) {
		s = r.def + "/" + s
	}
	n, err := distribution.ParseNormalizedNamed(s)
	if err != nil {
		return fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	r.Name = n.Name()
	if d, ok := n.(distribution.Digested); ok {
		if r.Digest = d.Digest().String(); !Digest().MatchString(r.Digest) {
			return fmt.Errorf("%w: digests other than sha256", fault.ErrUnsupported)
		}
	}
	if t, ok := n.(distribution.Tagged); ok {
		r.Tag = t.Tag()
	} else if r.Digest == "" {
		r.Tag = "latest"
	}
	return nil
}

// hasRegistry reports, by Docker's rule, whether a name begins with a registry.
func hasRegistry(s string) bool {
	host, _, ok := strings.Cut(s, "/")
	return ok && (strings.ContainsAny(host, ".:") || host == "localhost" || strings.ToLower(host) != host)
}

// String is the canonical form, which Parse reads again.
func (r Reference) String() string {
	switch r.Transport {
	case Docker:
		s := r.Image()
		if t, _ := split(s); t != Docker { // a registry on a host called "oci"
			return "docker://" + s
		}
		return s
	case DockerDaemon, ContainersStorage:
		return string(r.Transport) + ":" + r.Image()
	case DockerArchive, OCI, OCIArchive, Dir:
		s := string(r.Transport) + ":" + r.Path
		if i := r.Image(); i != "" {
			s += ":" + i
		}
		return s
	case Bootstrap:
		s := string(r.Transport) + ":" + r.Name
		if len(r.Query) > 0 {
			s += "?" + encodeQuery(r.Query)
		}
		return s
	}
	return ""
}

// Image is what is left without transport and path.
func (r Reference) Image() string {
	s := r.Name
	if r.Tag != "" {
		if s != "" {
			s += ":"
		}
		s += r.Tag
	}
	if r.Digest != "" {
		if s != "" || r.Path != "" {
			s += "@"
		}
		s += r.Digest
	}
	return s
}

// Familiar is what people write: without what goes without saying.
func (r Reference) Familiar() string {
	if r.Transport != Docker {
		return r.String()
	}
	short := r
	def := r.def
	if def == "" {
		def = DockerHub
	}
	if rest, ok := strings.CutPrefix(r.Name, def+"/"); ok {
		if def == DockerHub {
			if official, ok := strings.CutPrefix(rest, "library/"); ok && !strings.Contains(official, "/") {
				rest = official
			}
		}
		if !hasRegistry(rest) {
			short.Name = rest
		}
	}
	if short.Tag == "latest" && short.Digest == "" {
		short.Tag = ""
	}
	return short.String()
}

// The keys of a bootstrap's query.
var (
	distroRule    = lazy.Regexp(`^[a-z0-9][a-z0-9.+-]*/[a-z0-9][a-z0-9.+-]*$`)
	packageRule   = lazy.Regexp(`^[a-z0-9][a-z0-9.+-]*(:[a-z0-9]+)?$`)
	componentRule = lazy.Regexp(`^[a-z0-9][a-z0-9-]*(/[a-z0-9-]+)*$`)
	variantRule   = lazy.Regexp(`^(extract|custom|essential|apt|minbase|required|buildd|important|standard)$`)
	mirrorRule    = lazy.Regexp(`^((https?|file|copy)(://|:/)[!-~]+|deb( \[[a-z0-9=,/. -]+\])? (https?|file|copy):/[!-~]+ [!-~]+( [!-~]+)*)$`)
	archRule      = lazy.Regexp(`^[a-z0-9-]+$`)
	bootstrapKeys = map[string]func() *regexp.Regexp{
		"include": packageRule, "components": componentRule, "variant": variantRule,
		"mirror": mirrorRule, "arch": archRule, "epoch": Epoch,
	}
)

// bootstrap reads DISTRIBUTION/SUITE[?QUERY].
func (r *Reference) bootstrap(s string) error {
	name, query, _ := strings.Cut(s, "?")
	if len(name) > 200 || !distroRule().MatchString(name) {
		return fmt.Errorf("%w: %.100q is not DISTRIBUTION/SUITE, such as debian/bookworm", fault.ErrInvalid, name)
	}
	q, err := url.ParseQuery(query)
	if err != nil {
		return fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	r.Name, r.Query = name, url.Values{}
	for key, values := range q {
		rule := bootstrapKeys[key]
		if rule == nil {
			return fmt.Errorf("%w: %.100q is no key of a bootstrap (these are include, components, variant, mirror, arch, epoch)", fault.ErrInvalid, key)
		}
		list := values
		if key == "include" || key == "components" {
			list = nil
			for _, v := range values {
				list = append(list, strings.FieldsFunc(v, func(c rune) bool { return c == ',' })...)
			}
			slices.Sort(list)
			list = slices.Compact(list)
		}
		for _, v := range list {
			if !rule().MatchString(v) {
				return fmt.Errorf("%w: %s=%.100q", fault.ErrInvalid, key, v)
			}
		}
		switch {
		case len(list) == 0:
		case key == "include", key == "components":
			r.Query.Set(key, strings.Join(list, ","))
		case key == "mirror":
			r.Query[key] = list
		case len(list) > 1:
			return fmt.Errorf("%w: %s is given twice", fault.ErrInvalid, key)
		default:
			r.Query.Set(key, list[0])
		}
	}
	return nil
}

// encodeQuery is url.Values.Encode, but legible.
func encodeQuery(q url.Values) string {
	return strings.NewReplacer("%2C", ",", "%3A", ":", "%2F", "/").Replace(q.Encode())
}
