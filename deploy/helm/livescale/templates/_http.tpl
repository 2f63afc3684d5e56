{{/* What all pods have that serve HTTP: heads and gateways. */}}

{{- define "livescale.httpArgs" -}}
- --token-file=/run/secrets/livescale/token
- --host=$(POD_IP)
- --port=8000
{{- if .Values.apiKeys.secretName }}
- --api-key-file=/run/secrets/livescale-keys/api
{{- end }}
{{- if .Values.https.secretName }}
- --ssl-certfile=/run/secrets/livescale-https/tls.crt
- --ssl-keyfile=/run/secrets/livescale-https/tls.key
{{- end }}
{{- end }}

{{- define "livescale.scheme" -}}
{{- if .Values.https.secretName }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- define "livescale.aliveProbes" -}}
startupProbe:
  httpGet: {scheme: {{ include "livescale.scheme" . }}, path: /live, port: http}
  periodSeconds: 5
  failureThreshold: 360
livenessProbe:
  httpGet: {scheme: {{ include "livescale.scheme" . }}, path: /live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop: {exec: {command: [sleep, "5"]}}
{{- end }}

{{- define "livescale.httpMounts" -}}
- {name: token, mountPath: /run/secrets/livescale, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.apiKeys.secretName }}
- {name: keys, mountPath: /run/secrets/livescale-keys, readOnly: true}
{{- end }}
{{- if .Values.https.secretName }}
- {name: https, mountPath: /run/secrets/livescale-https, readOnly: true}
{{- end }}
{{- end }}

{{- define "livescale.httpVolumes" -}}
-
  {{- include "livescale.token" . | nindent 2 }}
- name: tmp
  emptyDir: {}
{{- if .Values.apiKeys.secretName }}
- name: keys
  secret: {secretName: {{ .Values.apiKeys.secretName }}, defaultMode: 0400}
{{- end }}
{{- if .Values.https.secretName }}
- name: https
  secret: {secretName: {{ .Values.https.secretName }}, defaultMode: 0400}
{{- end }}
{{- end }}
