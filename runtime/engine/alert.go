package engine

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Bounds of alerts.
const (
	alertTimeout   = 10 * time.Second
	maxAlertURL    = 2 << 10
	maxAlertSecret = 4 << 10
	minAlertSecret = 16
)

func isWebhook(o runtime.RestoreOptions) bool {
	return strings.HasPrefix(o.Alert, "http://") || strings.HasPrefix(o.Alert, "https://")
}

// checkAlert refuses an alert that would not work before it is needed.
func checkAlert(o runtime.RestoreOptions) error {
	switch {
	case o.Alert == "" && o.AlertSecret == "":
		return nil
	case isWebhook(o):
		u, err := url.Parse(o.Alert)
		if err != nil || u.Host == "" || u.User != nil || len(o.Alert) > maxAlertURL {
			// Do not print the URL: it may contain a secret.
			return fmt.Errorf("%w: the alert's URL: http[s]://HOST/PATH of at most %d bytes, without a user",
				runtime.ErrInvalid, maxAlertURL)
		}
		if o.AlertSecret != "" {
			_, err = alertKey(o.AlertSecret)
		}
		return err
	case o.AlertSecret != "":
		return fmt.Errorf("%w: an alert's secret signs what is posted to a URL", runtime.ErrInvalid)
	case !filepath.IsAbs(o.Alert):
		return fmt.Errorf("%w: alert %.80q: the absolute path of a program, or an http or https URL",
			runtime.ErrInvalid, o.Alert)
	}
	if _, err := policy.Trusted(o.Alert); err != nil {
		return fmt.Errorf("root runs the alert, and %w", err)
	}
	return nil
}

// alertKey reads the signing key from a file that only root can access.
func alertKey(file string) ([]byte, error) {
	real, err := policy.Trusted(file)
	if err != nil {
		return nil, fmt.Errorf("the alert's secret: %w", err)
	}
	f, err := os.OpenFile(real, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o077 != 0 {
		return nil, hint(
			fmt.Errorf("%w: the alert's secret, %s, can be read by others than root", runtime.ErrDenied, file),
			"Run 'chmod 0600 "+file+"'.")
	}
	key, err := io.ReadAll(io.LimitReader(f, maxAlertSecret+int64(len("\r\n"))+1))
	// Remove one end of line, as an editor or echo adds it; a second one belongs to the key.
	if line, ok := bytes.CutSuffix(key, []byte("\n")); ok {
		key = bytes.TrimSuffix(line, []byte("\r"))
	}
	if err == nil && (len(key) < minAlertSecret || len(key) > maxAlertSecret) {
		err = fmt.Errorf("%w: the alert's secret has to have %d to %d bytes", runtime.ErrInvalid,
			minAlertSecret, maxAlertSecret)
	}
	return key, err
}

// alert reports a restore that failed for good. It does not report one that was refused
// before anything was tried, or that its caller ended: the caller knows.
func (e *core) alert(ctx context.Context, t *trying, failed error) error {
	if t.opts.Alert == "" || !t.begun || ctx.Err() != nil {
		return nil
	}
	facts := t.h.facts
	facts.Hook, facts.Error, facts.Attempts, facts.Held = "alert", failed.Error(), t.attempts, t.held
	body, err := json.Marshal(facts)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if isWebhook(t.opts) {
		err = post(ctx, t.opts, body)
	} else {
		h := *t.h
		h.facts = facts
		var said string
		said, err = hostRun(ctx, []string{t.opts.Alert}, h.environ(facts), append(body, '\n'), alertTimeout)
		err = saying(err, said)
	}
	if err != nil {
		e.log.Info("alert failed", "sandbox", facts.Sandbox.ID, "err", err)
		return fmt.Errorf("the alert failed: %w", err)
	}
	return nil
}

// post sends an alert to a URL. Its errors name only the URL's host.
func post(ctx context.Context, o runtime.RestoreOptions, body []byte) error {
	ctx, cancel := context.WithTimeout(ctx, alertTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.Alert, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%w: the alert's URL", runtime.ErrInvalid)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "agentbox")
	if o.AlertSecret != "" {
		key, err := alertKey(o.AlertSecret)
		if err != nil {
			return err
		}
		at := strconv.FormatInt(time.Now().Unix(), 10)
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(at + "."))
		mac.Write(body)
		req.Header.Set(runtime.AlertSignature, "t="+at+",v1="+hex.EncodeToString(mac.Sum(nil)))
	}
	transport := &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 16 << 10}
	client := http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	resp, err := client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err
		}
		return fmt.Errorf("%s: %w", req.URL.Host, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s answers %d", req.URL.Host, resp.StatusCode)
	}
	return nil
}
