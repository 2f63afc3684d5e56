{{- define "livescale.heads" -}}
{{ .Release.Name }}-head:7000,{{ .Release.Name }}-standby:7000
{{- end }}

{{/* The pod of a head. `root` is the chart's, `component` head or standby, `own` its values. */}}
{{- define "livescale.headPod" -}}
{{- if and .root.Values.standby.enabled (not .root.Values.standby.lease) }}
# To read and write the Lease by which one head acts.
serviceAccountName: {{ .root.Release.Name }}-head
automountServiceAccountToken: true
{{- else }}
automountServiceAccountToken: false
{{- end }}
{{- include "livescale.pod" .root | nindent 0 }}
# Endpoints of the Service go (5 s), requests end (drain_timeout_s), processes end.
terminationGracePeriodSeconds: {{ add (int .root.Values.pool.drain_timeout_s) 20 }}
{{- if .root.Values.standby.enabled }}
# Not both heads on one node, where there are others.
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "livescale.headLabels" .root | nindent 8 }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: livescale
    {{- include "livescale.image" .root | nindent 4 }}
    args:
      - serve
      - --config=/etc/livescale/pool.yaml
      - --workers=0
      - --listen=$(POD_IP):7000
      {{- if eq .component "standby" }}
      - --standby
      {{- end }}
      {{- if .root.Values.standby.enabled }}
      - --heads={{ include "livescale.heads" .root }}
      - --lease={{ default (printf "kubernetes:%s" .root.Release.Name) .root.Values.standby.lease }}
      {{- end }}
      {{- if .root.Values.rackLabel }}
      - --rack=$(RACK)
      {{- end }}
      {{- if .root.Values.tls.headSecret }}
      - --tls-dir=/run/secrets/livescale-tls
      {{- end }}
      {{- include "livescale.httpArgs" .root | nindent 6 }}
      {{- with .own.extraArgs }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    env:
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- if .root.Values.rackLabel }}
      - name: RACK
        valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .root.Values.rackLabel }}']"}}
      {{- end }}
    ports:
      - {name: http, containerPort: 8000}
      - {name: control, containerPort: 7000}
    readinessProbe:
      httpGet: {scheme: {{ include "livescale.scheme" .root }}, path: {{ .root.Values.head.readinessPath }}, port: http}
      periodSeconds: 2
    # While it is slow to start (files of large models are hashed) it is not asked whether it lives.
    {{- include "livescale.aliveProbes" .root | nindent 4 }}
    resources:
      {{- toYaml .own.resources | nindent 6 }}
    volumeMounts:
      - {name: pool, mountPath: /etc/livescale, readOnly: true}
      - {name: models, mountPath: /models, readOnly: true}
      {{- if .root.Values.tls.headSecret }}
      - {name: tls, mountPath: /run/secrets/livescale-tls, readOnly: true}
      {{- end }}
      {{- include "livescale.httpMounts" .root | nindent 6 }}
      {{- with .own.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: pool
    configMap: {name: {{ .root.Release.Name }}-pool}
  - name: models
    {{- toYaml .root.Values.modelsVolume | nindent 4 }}
  {{- if .root.Values.tls.headSecret }}
  - name: tls
    secret: {secretName: {{ .root.Values.tls.headSecret }}, defaultMode: 0400}
  {{- end }}
  {{- include "livescale.httpVolumes" .root | nindent 2 }}
  {{- with .own.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
