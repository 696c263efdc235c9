package authz

import (
	"bytes"
	"errors"
	"fmt"
	"mime"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/versions"
	"github.com/docker/docker/api/types/volume"

	"github.com/agentbox/agentbox/internal/lazy"
)

// Request is a call of Docker's API as dockerd passes it to its authorization plugins.
type Request struct {
	User            string            `json:",omitempty"` // of the client's certificate; empty on a unix socket
	UserAuthNMethod string            `json:",omitempty"`
	RequestMethod   string            `json:",omitempty"`
	RequestURI      string            `json:"RequestUri,omitempty"`
	RequestBody     []byte            `json:",omitempty"`
	RequestHeaders  map[string]string `json:",omitempty"`
}

// Decision is the judge's answer. Rule, Key and Msg are empty if Allow is set.
type Decision struct {
	Allow bool
	Rule  string // what was broken: privileged, host mount, ...
	Key   string // the first key of the policy that would have to change; "" if none would help
	Msg   string // everything that was broken, for the caller to read
}

// Options are the inputs of a Judge besides the policy.
type Options struct {
	// Driver is the name under which dockerd knows this plugin, as a volume
	// driver too. Empty: agentbox.
	Driver string
	// Sockets are guarded by mounts.docker_socket besides the usual ones: the
	// plugin's own, and a daemon's in an unusual place.
	Sockets []string
	// State are directories guarded by mounts.engine_state besides the usual ones.
	State []string
}

// Judge judges calls. It is safe for concurrent use.
type Judge struct {
	policy  Policy
	driver  string
	sockets []string
	state   []string

	// The patterns of the policy as settled when the judge was made.
	allow, readOnly, devices []string
	writable                 []string // whatever containers may get read-write

	routes func() ([]netip.Prefix, error) // hostRoutes
}

// NewJudge makes a judge of the policy; nil is the safe default. Symlinks in
// the policy's paths are resolved here, once.
func NewJudge(p *Policy, opts Options) *Judge {
	j := &Judge{driver: opts.Driver, routes: hostRoutes}
	if p != nil {
		j.policy = *p
	}
	if j.driver == "" {
		j.driver = "agentbox"
	}
	j.sockets = append(slices.Clone(opts.Sockets), engineSockets...)
	j.state = append(slices.Clone(opts.State), engineState...)
	m := &j.policy.Mounts
	j.state = append(j.state, m.Guard...)
	j.allow, j.writable = settle(m.Allow, nil, m.Exchangeable)
	j.readOnly, _ = settle(m.ReadOnly, j.writable, m.Exchangeable)
	j.devices, _ = settle(j.policy.Devices, j.writable, m.Exchangeable)
	return j
}

// findings collects what is wrong with one call.
type findings struct {
	list []finding
}

type finding struct{ rule, key, text string }

// maxFindings bounds a message: a body can break as many rules as it has bytes.
const maxFindings = 8

func (f *findings) add(rule, key, format string, args ...any) {
	one := finding{rule, key, fmt.Sprintf(format, args...)}
	if !slices.Contains(f.list, one) && len(f.list) <= maxFindings {
		f.list = append(f.list, one)
	}
}

func (f *findings) full() bool { return len(f.list) > maxFindings }

func (f *findings) decision() Decision {
	if len(f.list) == 0 {
		return Decision{Allow: true}
	}
	d := Decision{Rule: f.list[0].rule, Key: f.list[0].key}
	var parts []string
	for i, one := range f.list {
		if i == maxFindings {
			parts = append(parts, "and more")
			break
		}
		s := one.rule + ": " + one.text
		if one.key != "" {
			s += " (policy key " + one.key + ")"
		} else {
			s += " (no key of the policy allows it)"
		}
		parts = append(parts, s)
	}
	d.Msg = strings.Join(parts, "; ")
	return d
}

// apiVersion is the prefix that dockerd takes from a path.
var apiVersion = lazy.Regexp(`^/v([0-9.]+)(/|$)`)

// Judge decides about one call.
func (j *Judge) Judge(r Request) Decision {
	var f findings
	u, err := url.ParseRequestURI(r.RequestURI)
	if err != nil {
		f.add("call", "", "its address cannot be read")
		return f.decision()
	}
	// dockerd routes by the decoded path, and redirects from what is not clean.
	p := path.Clean("/" + u.Path)
	version := ""
	if m := apiVersion().FindStringSubmatch(p); m != nil {
		version = m[1]
		p = "/" + strings.TrimPrefix(p, m[0])
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		f.add("call", "", "its query cannot be read")
		return f.decision()
	}
	c := call{Request: r, path: p, parts: split(p), version: version, query: query}
	j.route(&c, &f)
	return f.decision()
}

// A call is a request whose address has been taken apart.
type call struct {
	Request
	path    string // clean, without the version
	parts   []string
	version string // "" if the address has none
	query   url.Values
}

func (c *call) first() string {
	if len(c.parts) == 0 {
		return ""
	}
	return c.parts[0]
}

// is matches METHOD and a pattern such as /containers/{}/start, where {} is a
// name that may hold slashes, as dockerd's routes have it.
func (c *call) is(method, pattern string) bool {
	if c.RequestMethod != method {
		return false
	}
	before, after, named := strings.Cut(pattern, "{}")
	if !named {
		return c.path == pattern
	}
	return len(c.path) > len(before)+len(after) && strings.HasPrefix(c.path, before) && strings.HasSuffix(c.path, after)
}

// harmless are the calls that change things, but give no container more of the host than
// containers have that were judged already. body is the shape of what they take as JSON;
// others take none, or a stream of another kind.
var harmless = []struct{ method, pattern, body string }{
	{"POST", "/auth", "auth"},
	{"POST", "/build/cancel", ""},
	{"POST", "/build/prune", ""},
	{"POST", "/commit", "commit"},
	{"POST", "/containers/prune", ""},
	{"POST", "/containers/{}/attach", ""},
	{"POST", "/containers/{}/copy", "copy"},
	{"POST", "/containers/{}/kill", ""},
	{"POST", "/containers/{}/pause", ""},
	{"POST", "/containers/{}/rename", ""},
	{"POST", "/containers/{}/resize", ""},
	{"POST", "/containers/{}/restart", ""},
	{"POST", "/containers/{}/stop", ""},
	{"POST", "/containers/{}/unpause", ""},
	{"POST", "/containers/{}/wait", ""},
	{"PUT", "/containers/{}/archive", ""},
	{"DELETE", "/containers/{}", ""},
	{"POST", "/exec/{}/resize", ""},
	{"POST", "/exec/{}/start", "exec start"},
	{"POST", "/images/load", ""},
	{"POST", "/images/prune", ""},
	{"POST", "/images/{}/push", "auth"},
	{"POST", "/images/{}/tag", ""},
	{"DELETE", "/images/{}", ""},
	{"POST", "/networks/prune", ""},
	{"POST", "/networks/{}/disconnect", "disconnect"},
	{"DELETE", "/networks/{}", ""},
	{"POST", "/volumes/prune", ""},
	{"DELETE", "/volumes/{}", ""},
}

// route finds what to judge in a call. The order matters: a name may hold
// slashes, so that the general patterns come last.
func (j *Judge) route(c *call, f *findings) {
	reads := c.RequestMethod == "GET" || c.RequestMethod == "HEAD" || c.RequestMethod == "OPTIONS"
	switch first := c.first(); {
	case first == "session", first == "grpc", c.is("POST", "/build"):
		j.build(c, f)
		return
	case c.is("GET", "/containers/{}/checkpoints"), c.is("POST", "/containers/{}/checkpoints"),
		c.RequestMethod == "DELETE" && len(c.parts) == 4 && first == "containers" && c.parts[2] == "checkpoints":
		j.checkpoint(c, f)
		return
	case reads:
		return
	case slices.Contains([]string{"swarm", "services", "nodes", "secrets", "configs", "tasks"}, first),
		c.is("PUT", "/volumes/{}"):
		if !j.policy.Swarm {
			f.add("swarm", "swarm", "services can mount anything of the host, so %s %s is refused",
				c.RequestMethod, quote(c.path))
		}
		return
	case first == "plugins":
		if !j.policy.Plugins {
			f.add("engine plugins", "plugins", "engine plugins are root on the host, so %s %s is refused",
				c.RequestMethod, quote(c.path))
		}
		return
	}
	switch {
	case c.is("POST", "/containers/create"):
		j.create(c, f)
	case c.is("POST", "/containers/{}/start"):
		j.start(c, f)
	case c.is("POST", "/containers/{}/exec"):
		j.exec(c, f)
	case c.is("POST", "/containers/{}/update"):
		var body container.UpdateConfig
		if j.read(c, f, "update", &body) {
			j.resources(&body.Resources, f)
		}
	case c.is("POST", "/images/create"):
		j.pull(c, f)
	case c.is("POST", "/volumes/create"):
		var body volume.CreateOptions
		if j.read(c, f, "volume", &body) {
			j.volume(body.Driver, body.DriverOpts, f)
			if body.ClusterVolumeSpec != nil && !j.policy.Swarm {
				f.add("volume", "swarm", "a volume of the swarm is not allowed")
			}
		}
	case c.is("POST", "/networks/create"):
		j.network(c, f)
	case c.is("POST", "/networks/{}/connect"):
		j.connect(c, f)
	default:
		j.other(c, f)
	}
}

func (j *Judge) other(c *call, f *findings) {
	for _, h := range harmless {
		if c.is(h.method, h.pattern) {
			j.rest(c, h.body, f)
			return
		}
	}
	if j.policy.UnknownCalls != Allow {
		f.add("unknown call", "unknown_calls", "%s %s is no call that the judge knows",
			quote(c.RequestMethod), quote(c.path))
	}
}

// rest looks at the body of a call that needs none: whether it has fields that
// the judge has not decided about.
func (j *Judge) rest(c *call, shape string, f *findings) {
	if shape == "" {
		shape = "nothing"
	}
	if len(bytes.TrimSpace(c.RequestBody)) > 0 {
		var any any
		j.read(c, f, shape, &any)
	}
}

// read decodes the body into v and holds it against the shape of that name;
// false means that the call is refused for it.
func (j *Judge) read(c *call, f *findings, name string, v any) bool {
	s := shapes()[name]
	if j.policy.UnknownFields == Allow {
		s = nil
	}
	err := decode(c.RequestBody, v, s)
	if err == nil {
		return true
	}
	key := ""
	if errors.Is(err, errUnknownField) {
		key = "unknown_fields"
	}
	f.add("unreadable body", key, "%v", err)
	return false
}

// createBody is the body as the daemon decodes it. Daemons before 23 also took the settings of
// HostConfig from the top level, if there was no HostConfig.
type createBody struct {
	*container.Config
	HostConfig       *container.HostConfig
	NetworkingConfig *network.NetworkingConfig
}

func (j *Judge) create(c *call, f *findings) {
	var body createBody
	var legacy container.HostConfig
	if !j.read(c, f, "create", &body) || !j.read(c, f, "create", &legacy) {
		return
	}
	j.hostConfig(&legacy, f)
	if body.HostConfig != nil {
		j.hostConfig(body.HostConfig, f)
	}
	if body.Config != nil && len(body.Config.Volumes) > 0 {
		j.volume("", nil, f)
	}
	if body.NetworkingConfig != nil {
		for name, e := range body.NetworkingConfig.EndpointsConfig {
			if f.full() {
				return
			}
			j.endpoint(name, e, f)
		}
	}
}

// pull: the daemon fetches an image from any URL, as root and from the host's
// network, where that is the source.
func (j *Judge) pull(c *call, f *findings) {
	j.form(c, f)
	for _, src := range c.query["fromSrc"] {
		if src != "" && src != "-" && !j.policy.ImageURLs {
			f.add("image url", "image_urls", "the daemon would fetch %s from the host's network", quote(src))
		}
	}
	j.rest(c, "", f)
}

// form refuses a body that would be taken for more of the query: dockerd does
// not send it along.
func (j *Judge) form(c *call, f *findings) {
	kind, _ := header(c.RequestHeaders, "Content-Type")
	if kind == "" {
		return
	}
	media, _, err := mime.ParseMediaType(kind)
	if err != nil || media == "application/x-www-form-urlencoded" || media == "multipart/form-data" {
		f.add("unreadable body", "",
			"a body declared as %s can hold parameters that the judge is not shown", quote(kind))
	}
}

// start: before version 1.24 of the API it could carry a HostConfig. dockerd reads it only if
// it has a declared type, so the declaration reveals a body that was not sent along.
func (j *Judge) start(c *call, f *findings) {
	j.form(c, f)
	for _, dir := range c.query["checkpoint-dir"] {
		j.hostPath(dir, false, "start a checkpoint from", f)
	}
	for _, name := range c.query["checkpoint"] {
		if name != "" {
			checkpointName(name, f)
		}
	}
	_, declared := header(c.RequestHeaders, "Content-Type")
	if len(c.RequestBody) == 0 && (c.version == "" || !declared || !versions.LessThan(c.version, "1.24")) {
		return
	}
	var body container.HostConfig
	if j.read(c, f, "start", &body) {
		j.hostConfig(&body, f)
	}
}

func header(h map[string]string, name string) (string, bool) {
	for k, v := range h {
		if strings.EqualFold(k, name) {
			return v, true
		}
	}
	return "", false
}

func (j *Judge) exec(c *call, f *findings) {
	var body container.ExecOptions
	if j.read(c, f, "exec", &body) && body.Privileged && !j.policy.Privileged {
		f.add("privileged", "privileged", "a privileged exec has the host's devices and every capability")
	}
}

// checkpoint: the daemon lists, writes and removes in any directory of a request.
func (j *Judge) checkpoint(c *call, f *findings) {
	for _, dir := range c.query["dir"] {
		if c.RequestMethod == "GET" {
			j.hostPath(dir, false, "list checkpoints in", f)
		} else {
			j.hostPath(dir, true, "remove checkpoints from", f)
		}
	}
	if c.RequestMethod != "POST" {
		return
	}
	var body struct {
		CheckpointID, CheckpointDir string
		Exit                        bool
	}
	if !j.read(c, f, "checkpoint", &body) {
		return
	}
	if body.CheckpointDir != "" {
		j.hostPath(body.CheckpointDir, true, "write a checkpoint to", f)
	}
	checkpointName(body.CheckpointID, f)
}

func checkpointName(name string, f *findings) {
	if !volumeName().MatchString(name) { // the same rule
		f.add("host path", "", "%s is no name of a checkpoint", quote(name))
	}
}

// build: everything but the query is invisible, and a form in the body would override the
// query, so that only policy.Build is a fence. The network mode is checked to catch
// mistakes.
func (j *Judge) build(c *call, f *findings) {
	if !j.policy.Build {
		f.add("build", "build", "a build can use the host's network, and what it runs is not judged")
		return
	}
	for _, mode := range c.query["networkmode"] {
		j.namespace("network", mode, f)
	}
}
