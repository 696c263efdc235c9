package main

import (
	"encoding/base64"
	"encoding/hex"
	"io"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// writeBOM writes a bill of materials: the binaries, the modules, and which is in which.
// It has no time and no serial number: of the same binaries it is the same bytes.
func writeBOM(w io.Writer, version, target string, binaries []binary, modules []*module) error {
	bom := cdx.NewBOM()
	root := cdx.Component{BOMRef: "agentbox", Type: cdx.ComponentTypeApplication, Name: "agentbox", Version: version,
		Licenses:           &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
		ExternalReferences: &[]cdx.ExternalReference{{Type: cdx.ERTypeWebsite, URL: project}}}
	var parts []cdx.Component
	var deps []cdx.Dependency
	var refs []string
	for _, b := range binaries {
		ref := "binary/" + b.name
		parts = append(parts, cdx.Component{BOMRef: ref, Type: cdx.ComponentTypeApplication,
			Name: b.name, Version: version,
			Properties: &[]cdx.Property{
				{Name: "agentbox:package", Value: b.pkg}, {Name: "agentbox:target", Value: target},
			}})
		refs = append(refs, ref)
		var needs []string
		for _, m := range b.modules {
			needs = append(needs, "module/"+m)
		}
		deps = append(deps, cdx.Dependency{Ref: ref, Dependencies: &needs})
	}
	root.Components = &parts
	var list []cdx.Component
	for _, m := range modules {
		c := cdx.Component{BOMRef: "module/" + m.path, Type: cdx.ComponentTypeLibrary, Name: m.path, Version: m.version,
			PackageURL: "pkg:golang/" + m.path + "@" + strings.ReplaceAll(m.version, "+", "%2B"),
			Scope:      cdx.ScopeRequired}
		if m.path == stdPath {
			c.PackageURL = "pkg:golang/std@" + strings.TrimPrefix(m.version, "go")
		}
		if sum, ok := strings.CutPrefix(m.sum, "h1:"); ok {
			raw, err := base64.StdEncoding.DecodeString(sum)
			if err != nil {
				return err
			}
			c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
		}
		licences := cdx.Licenses{}
		for _, id := range m.ids() {
			switch {
			case strings.Contains(id, " "): // of which there may be one only
				licences = append(licences, cdx.LicenseChoice{Expression: id})
			case id == publicDomain: // is none of SPDX's
				licences = append(licences, cdx.LicenseChoice{License: &cdx.License{Name: id}})
			default:
				licences = append(licences, cdx.LicenseChoice{License: &cdx.License{ID: id}})
			}
		}
		c.Licenses = &licences
		list = append(list, c)
	}
	bom.Metadata = &cdx.Metadata{Component: &root}
	bom.Components = &list
	deps = append([]cdx.Dependency{{Ref: root.BOMRef, Dependencies: &refs}}, deps...)
	bom.Dependencies = &deps
	return cdx.NewBOMEncoder(w, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
}
